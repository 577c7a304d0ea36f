"""Small faults of the sources: each is one text for another, and the tests that can find it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`text` stands once in the files called `file` (one of several names, by `|`) and becomes `instead`.

    tests: paths, the likely finder first. old: `text` and `instead` in trees where they differ.
    """

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]
    old: tuple[str, str] = ("", "")


def _of(room: str, *files: str) -> tuple[str, ...]:
    return tuple(f"tests/{room}/test_{file}.py" for file in files)


PROGRAMS = _of("passes", "programs")
ORDERS = _of("plans", "orders")
PROGRESS = _of("plans", "progress")
DENSE = _of("ops", "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
EXPERTS = _of("ops", "all_to_all_expert_matmul", "expert_matmul_all_to_all")
DENSE_KERNELS = _of("kernels", "interpreted", "ptx")
CUDA = _of("kernels", "cuda_ptx", "cuda_ptx_experts")

PASSES = (
    Mutation(
        "outer and inner dims of a cut swapped",
        "layout.py",
        "return Cut(i, prod(x.size for x in before), digit, rest)",
        "return Cut(i, prod(x.size for x in after), digit, rest)",
        (*_of("passes", "layout", "chains", "graphs"), *PROGRAMS),
        (
            "return Cut(i, product(x.size for x in before), digit, rest)",
            "return Cut(i, product(x.size for x in after), digit, rest)",
        ),
    ),
    Mutation(
        "a digit is split the wrong way round",
        "layout.py",
        "            group.append(halves[0])\n            rest.append(halves[1])",
        "            group.append(halves[1])\n            rest.append(halves[0])",
        (*_of("passes", "layout", "chains"), *PROGRAMS),
    ),
    Mutation(
        "alpha of an addition is not looked at",
        "product.py",
        'if argument(n, 2, "alpha", 1) != 1 or n.kwargs.get("rounding_mode") is not None:',
        'if n.kwargs.get("rounding_mode") is not None:',
        (*_of("passes", "graphs"), *PROGRAMS),
    ),
    Mutation(
        "a sum is merged though its product is read besides",
        "merge.py",
        "if op.target not in _REDUCTIONS or list(op.users) != [item] or item.args[1] != 0:",
        "if op.target not in _REDUCTIONS or item.args[1] != 0:",
        (*_of("passes", "graphs"), *PROGRAMS),
    ),
    Mutation(
        "the bias of merged terms goes to the wrong term",
        "merge.py",
        'key=lambda op: op.args[3] == "mm")',
        'key=lambda op: op.args[3] != "mm")',
        (*_of("passes", "graphs"), *PROGRAMS),
    ),
    Mutation(
        "a tail reads what a later collective computes",
        "walk.py",
        "            if is_collective(n):\n",
        "            if False:\n",
        _of("passes", "tails"),
    ),
    Mutation(
        "memory that changes before a stage of a tail",
        "walk.py",
        "        if any(self.op < m < n for m in self.changing):\n",
        "        if False:\n",
        _of("passes", "tails"),
    ),
    Mutation(
        "a mean without its dim is taken for that of a norm",
        "norms.py",
        "return kept is True and isinstance",
        "return isinstance",
        _of("passes", "tails"),
    ),
    Mutation(
        "a norm of heads is taken for one of rows",
        "walk.py",
        "not shape or not same_size(shape[-1], self.size[1])",
        "not shape",
        _of("passes", "tails"),
    ),
    Mutation(
        "Bessel's correction is not looked at",
        "norms.py",
        'both.args[0] is not v or both.kwargs.get("correction") != 0 or not',
        "both.args[0] is not v or not",
        _of("passes", "tails"),
    ),
    Mutation(
        "gathers are merged over a collective between them",
        "merge.py",
        "return all(collective_above(n, first.prev) is None for n in inputs)",
        "return len(inputs) > 0",
        (*_of("robustness", "order"), *PROGRAMS),
    ),
    Mutation(
        "of two collectives the one that gains less gets the matmul",
        "between.py",
        ">= sum(known[1 + len(left) :])",
        "<= sum(known[1 + len(left) :])",
        _of("passes", "on_gpus"),
    ),
    Mutation(
        "what is gathered twice stays so",
        "gathered_once.py",
        "and same_value(anchor.input, first.input)",
        "and anchor is first",
        _of("passes", "between"),
    ),
    Mutation(
        "the last bags of a rank take all entries behind them",
        "bags.py",
        "ended = pooling.last or stop < offsets.shape[0]",
        "ended = pooling.last",
        _of("ops", "bags"),
    ),
    Mutation(
        "factors of tokens are taken for those of rows",
        "token_sum.py|token_sums.py",
        "if before is None and index is None:",
        "if before is None:",
        _of("ops", "grouped"),
    ),
    Mutation(
        "a row's number may be negative behind a choice",
        "row_numbers.py",
        "return may(args[1:])",
        "return may(args[1])",
        _of("passes", "row_numbers"),
    ),
    Mutation(
        "a weight may depend on what is gathered",
        "gather_matmul.py",
        "late = depends_on(anchor, c.inputs)",
        "late = depends_on(anchor, c.inputs[:0])",
        (*_of("robustness", "order", "reasons"), *PROGRAMS),
    ),
    Mutation(
        "sorted values pass for a permutation",
        "permutation.py",
        "index.args[1:] == (1,)",
        "index.args[1:] == (0,)",
        (*_of("passes", "exchange_graphs"), *PROGRAMS),
    ),
    Mutation(
        "the second kernel of a call asks whether it may start",
        "prepared.py",
        "aligned, guard.generation.value, follows,",
        "aligned, guard.generation.value, False,",
        _of("kernels", "prepared"),
    ),
    Mutation(
        "the kept rows of a rank are taken from its inbox",
        "kept_rows.py",
        "if source == rank:",
        "if source == rank + W:",
        _of("kernels", "interpreted"),
    ),
    Mutation(
        "ranges that touch stay apart",
        "crossover.py",
        "start <= joined[-1][1] + 1:",
        "start <= joined[-1][1]:",
        _of("passes", "cost_model", "choose"),
    ),
    Mutation(
        "one chunk too many on the links",
        "cost_model.py",
        "linked, copied, waits = (world - 1) * chunk, sent + chunk, 1",
        "linked, copied, waits = world * chunk, sent + chunk, 1",
        _of("passes", "cost_model", "choose"),
    ),
)

PLANS = (
    Mutation(
        "a producer does not wait for one peer",
        "orders.py",
        "yield from (Wait(world, peer, 0) for peer in _peers(world, rank))",
        "yield from (Wait(world, peer, 0) for peer in _peers(world, rank)[1:])",
        ORDERS,
    ),
    Mutation(
        "direct order begins with the own chunk",
        "orders.py",
        "return [(rank + own_last + i) % world for i in range(world)]",
        "return [(rank + i) % world for i in range(world)]",
        ORDERS,
    ),
    Mutation(
        "slots of a ring are numbered a stage too far",
        "orders.py",
        "yield Wait(step, left, taken + (stage - 1) * stride + i)",
        "yield Wait(step, left, taken + stage * stride + i)",
        ORDERS,
    ),
    Mutation(
        "the proof allows a store into what a peer reads",
        "verify.py",
        "if not self._over(rank, peer, time):",
        "if peer < 0:",
        (*_of("plans", "verify"), *ORDERS),
    ),
    Mutation(
        "the proof allows two peers at one rank",
        "verify.py",
        "assert busiest <= 1,",
        "assert busiest <= 2,",
        (*_of("plans", "verify"), *ORDERS),
    ),
    Mutation(
        "the proof ends before a buffer is used again",
        "verify.py",
        "EPOCHS = 3",
        "EPOCHS = 2",
        (*_of("plans", "verify"), *ORDERS),
    ),
)

EXECUTORS = (
    Mutation(
        "partial sums of a ring are rounded at every rank",
        "reduce_steps.py",
        "tiles, torch.float32 if self.ring else dtype)",
        "tiles, dtype)",
        DENSE[:2],
    ),
    Mutation(
        "a gather of columns is multiplied part by part",
        "gather_executor.py",
        "late = dim == 1 or cut.inner < FEW_ROWS",
        "late = cut.inner < FEW_ROWS",
        DENSE[2:],
    ),
    Mutation(
        "an operand that broadcasts is cut",
        "tiles.py",
        "return t if at < 0 or t.shape[at] == 1 else self.read(t, at)",
        "return t if at < 0 else self.read(t, at)",
        DENSE[:2],
    ),
    Mutation(
        "a run begins at the start of its stretch",
        "tiles.py",
        "span.start // inner * stride + chunk * inner + span.start % inner",
        "span.start // inner * stride + chunk * inner",
        (*_of("ops", "tiles"), *DENSE[1:], *_of("ops", "plan_shapes")),
    ),
    Mutation(
        "the part of a source starts behind itself",
        "exchange_executor.py|exchange.py",
        "for sent in self.sends[:source])",
        "for sent in self.sends[: source + 1])",
        EXPERTS,
    ),
)

PROTOCOL = (
    Mutation(
        "calls that were never seen do not meet first",
        "workspace.py",
        "if new or self.nbytes > ws.capacity:",
        "if self.nbytes > ws.capacity:",
        (*_of("workspace", "calls", "failures"), *_of("robustness", "alike")),
    ),
    Mutation(
        "the first call in grown buffers takes the wrong half",
        "workspace.py",
        "self._offset = (self.epoch & 1) * capacity",
        "self._offset = (self.epoch & 0) * capacity",
        (*_of("workspace", "calls"), *DENSE[:1]),
    ),
    Mutation(
        "a killed rank counts as alive until it is reaped",
        "rendezvous.py",
        'return "" if fields[0] in "ZX" else fields[19]',
        'return "" if fields[0] in "X" else fields[19]',
        (*_of("workspace", "failures"), *_of("robustness", "killed")),
    ),
    Mutation(
        "who waits for sums is named, not the lost rank",
        "failures.py",
        "idle = [s for s in wanted if not waits.get(s)]",
        "idle = wanted[:1]",
        (*_of("workspace", "gpu_failures"), *_of("kernels", "interpreted")),
    ),
    Mutation(
        "waits of a kernel do not look at what the host says",
        "patience.py",
        "if polls % POLLS_PER_STOP == 0:",
        "if polls < 0:",
        _of("kernels", "interpreted"),
    ),
    Mutation(
        "a reset forgets nothing that ranks have agreed on",
        "workspace.py",
        "for known in (self._kernels, self._entered, self._compared):",
        "for known in (self._kernels, self._entered):",
        (*_of("workspace", "gpu_failures"), *_of("workspace", "gpu_enter")),
    ),
    Mutation(
        "what a kernel has counted stays after a reset",
        "memory.py",
        "self.state[State.GIVEN_UP : State.FIRM] = 0",
        "self.state[State.GIVEN_UP : State.TICKETS] = 0",
        (*_of("workspace", "gpu_failures"), *_of("kernels", "interpreted")),
    ),
    Mutation(
        "a rank in another call is not noticed",
        "signal.cpp",
        "return int(af::kMismatch);",
        "return int(kPending);",
        (*_of("workspace", "failures"), *_of("robustness", "alike")),
    ),
    Mutation(
        "the last word of a kernel's state stays",
        "comm.py",
        "for word in tl.static_range(STATE_FINISHED, STATE_FIRM):",
        "for word in tl.static_range(STATE_FINISHED, STATE_JOINED):",
        _of("kernels", "interpreted_embedding_backward", "interpreted", "interpreted_embedding"),
        ("for word in tl.static_range(4, 8):", "for word in tl.static_range(4, 7):"),
    ),
    Mutation(
        "of several counters only the first is waited for",
        "comm.py",
        "counter = counters + i * stride",
        "counter = counters",
        _of("kernels", "interpreted", "interpreted_embedding"),
    ),
    Mutation(
        "packets of all calls go to one half",
        "matmul_packets.py",
        "base = half_of(epoch) * packets_half",
        "base = half_of(epoch * 0) * packets_half",
        DENSE_KERNELS[:1],
    ),
    Mutation(
        "nobody does the shares of programs that are not placed",
        "shares.py",
        "if any_thread(seen < enough):",
        "if any_thread(seen < 0):",
        DENSE_KERNELS[:1],
    ),
    Mutation(
        "programs take shares that have been taken",
        "shares.py",
        "    mine = won(asked, program)\n",
        "    mine = won(asked, program) | (asked != 0)\n",
        DENSE_KERNELS[:1],
    ),
    Mutation(
        "the first ticket of a program is its number",
        "matmul_gather.py",
        "        ticket = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)\n    while",
        "        ticket = program\n    while",
        DENSE_KERNELS[:1],
    ),
    Mutation(
        "the plan of progress: programs wait before they look for shares",
        "progress.py",
        "yield go(LOOK, sent=(*rank.sent, share))",
        "yield go(ASK, sent=(*rank.sent, share))",
        PROGRESS,
    ),
    Mutation(
        "the plan of progress: nobody looks for shares",
        "progress.py",
        "yield go(ASK if rank.started == self.programs else SCAN)",
        "yield go(ASK)",
        PROGRESS,
    ),
    Mutation(
        "the plan of progress: the last program leaves",
        "progress.py",
        "if not stays and rank.started - rank.left > self.firm:",
        "if not stays and rank.started > 0:",
        PROGRESS,
        ("if rank.started - rank.left > self.firm:", "if rank.started > 0:"),
    ),
    Mutation(
        "columns that a program has left stay as they are",
        "packet_shares.py",
        "return last, tl.where((left != 0) | (before >> 32 != 0), last, 0)",
        "return last, tl.where(before < 0, last, 0)",
        _of("kernels", "interpreted"),
    ),
    Mutation(
        "marks of shares are those of any call",
        "packet_shares.py",
        "marks, tag = marks_of(state, part), tag_of(epoch)\n    offset",
        "marks, tag = marks_of(state, part), tag_of(epoch * 0)\n    offset",
        _of("kernels", "interpreted"),
    ),
    Mutation(
        "warps decide each for themselves whether packets are missing",
        "comm.py",
        "return any_thread(tl.max(((packets >> 32) != tag).to(tl.int32), axis=None) != 0)",
        "return tl.max(((packets >> 32) != tag).to(tl.int32), axis=None) != 0",
        _of("kernels", "ptx"),
    ),
    Mutation(
        "the plan of progress: sums are copied before they are made",
        "progress.py",
        "share = number // 2 - (self.lag if number % 2 else 0)",
        "share = number // 2 - (0 if number % 2 else self.lag)",
        PROGRESS,
    ),
)

KERNELS = (
    Mutation(
        "strided parts are read as if dense",
        "reduce.cpp",
        "dense = dense && strides[p] == cols;",
        "dense = dense && strides[p] >= cols;",
        (*_of("workspace", "reduce"), *DENSE[:1]),
    ),
    Mutation(
        "the mean of squares is their sum",
        "embedding_update.cpp",
        "*u.state += total / float(std::max<int64_t>(1, u.dim));",
        "*u.state += total;",
        _of("ops", "all_to_all_embedding_bag_update"),
    ),
    Mutation(
        "a mean counts padding",
        "embedding.cpp",
        "    if (*i == padding) continue;\n    ++used;",
        "    ++used;\n    if (*i == padding) continue;",
        _of("ops", "embedding_bag_all_to_all"),
    ),
    Mutation(
        "the last lanes of a row are left out",
        "linear.cpp",
        "if (whole < job.k) step(whole, job.k - whole);",
        "if (whole + 1 < job.k) step(whole, job.k - whole);",
        _of("ops", "matmul", "matmul_all_reduce"),
    ),
    Mutation(
        "a part is reduced before the last rank's has come",
        "matmul_reduce.py",
        "wait_all(arrived + tile, tiles, W, 1, state,",
        "wait_all(arrived + tile, tiles, W - 1, 1, state,",
        DENSE_KERNELS,
    ),
    Mutation(
        "a mean in the kernel counts padding",
        "embedding_exchange.py",
        "used += keep.to(tl.int32)",
        "used += inside.to(tl.int32)",
        _of("kernels", "interpreted_embedding"),
    ),
    Mutation(
        "a row that begins at the edge of a strip is lost",
        "embedding_strips.py|embedding_backward.py",
        "((first != current) | (before != current))",
        "(first != current)",
        _of("kernels", "interpreted_embedding_backward", "interpreted_embedding_update"),
    ),
    Mutation(
        "Adagrad's eps is left out",
        "embedding_update.py",
        "(tl.sqrt_rn(state) + tl.load(rates + 1))",
        "tl.sqrt_rn(state)",
        _of("kernels", "interpreted_embedding_update"),
    ),
    Mutation(
        "no fence between TMA stores and their signal",
        "matmul_reduce.cu|frame.cuh",
        "        bulk_wait();\n        fence_proxy();\n",
        "        bulk_wait();\n",
        CUDA[:1],
    ),
    Mutation(
        "what was taken out of memory stays there",
        "words.cuh",
        "if (wanted(i)) store(place(i), {0, 0, 0, 0});",
        "if (wanted(i)) continue;",
        CUDA[:1],
    ),
    Mutation(
        "a ring begins with the wrong owner",
        "order.cuh",
        "return (rank + 2 * world - 1 - stage) % world;",
        "return (rank + 2 * world - stage) % world;",
        _of("kernels", "cluster_order", "expert_order"),
    ),
    Mutation(
        "an expert without rows gets a tile",
        "ragged_order.cuh",
        "if (numbers[middle] <= value)",
        "if (numbers[middle] < value)",
        _of("kernels", "ragged_order"),
    ),
    Mutation(
        "rows of the last run of a tile are forgotten",
        "expert_order.cuh",
        "return (owner + world - run % world) % world <= last - run;",
        "return (owner + world - run % world) % world < last - run;",
        _of("kernels", "expert_order"),
    ),
    Mutation(
        "a rank that adds everything begins at its own chunk",
        "exchange_sums.py",
        "mine = (0 if ONCE else rank) * chunk",
        "mine = rank * chunk",
        _of("kernels", "interpreted_sums"),
    ),
    Mutation(
        "owners of rows add those of the first owner",
        "exchange_rows.py",
        "first = 0 if ONCE else rank * owned",
        "first = 0",
        _of("kernels", "interpreted_rows"),
    ),
    Mutation(
        "packets of rows are added up for the first owner",
        "exchange_row_packets.py",
        "first = 0 if ALL else rank * owned",
        "first = 0",
        _of("kernels", "interpreted_rows"),
    ),
    Mutation(
        "programs of packets of rows leave the rows of late ones unsent",
        "exchange_row_packets.py",
        "share = further(seen, programs, state, A, programs, epoch)",
        "share = tl.full((), -1, tl.int32)",
        _of("kernels", "interpreted_rows"),
    ),
    Mutation(
        "the sum of a short call with a tail is its first result",
        "run.py",
        "return found[self._first :] if self._takes_tail",
        "return found if self._takes_tail",
        _of("kernels", "prepared_calls"),
    ),
    Mutation(
        "a graph with another proof takes the call of the first",
        "call.py",
        "args.tail, args.proof, *map(",
        "args.tail, *map(",
        _of("kernels", "prepared_calls"),
    ),
    Mutation(
        "owners of bags pool those of the first owner",
        "exchange_bags.py",
        "first = (0 if ONCE else owner) * chunk",
        "first = 0",
        _of("kernels", "interpreted_bag_sums"),
    ),
    Mutation(
        "owners of tokens add up those of the first owner",
        "exchange_tokens.py",
        "begun = (0 if ONCE else owner) * chunk + skipped",
        "begun = skipped",
        _of("kernels", "interpreted_tokens"),
    ),
    Mutation(
        "owners apply tails that are private to ranks",
        "reductions.py",
        "way.config.once or problem.written > 0",
        "True",
        _of("kernels", "choice"),
    ),
    Mutation(
        "the backward of a norm may divide by another number",
        "backward.py",
        "if last.args != (inner[-1], columns):",
        "if False:",
        _of("passes", "tails"),
    ),
    Mutation(
        "a norm counts the padding of a row",
        "tails.py",
        "/ columns + NUMBER)",
        "/ v.shape[1] + NUMBER)",
        _of("kernels", "interpreted_rows"),
    ),
)

CHOICE = (
    Mutation(
        "the host's time is added to the GPU's",
        "choose.py|choice.py",
        "(max(us, MANY_LAUNCHES_US) if",
        "(us + MANY_LAUNCHES_US if",
        _of("kernels", "choice", "prediction"),
        ("(max(us, here[way].host_us), us, way)", "(us + here[way].host_us, us, way)"),
    ),
    Mutation(
        "the slowest way is taken",
        "choose.py|choice.py",
        "return min(_possible(problem, predictor, serial), key=lasts)",
        "return max(_possible(problem, predictor, serial), key=lasts)",
        _of("kernels", "choice", "prediction"),
        ("return times[0][0]", "return times[-1][0]"),
    ),
    Mutation(
        "a kernel takes products with an epilogue",
        "matmul_all_reduce.py|ops.py",
        '(args.product != "mm" or args.terms > MOST_TERMS),',
        "(args.terms > MOST_TERMS),",
        (*_of("ops", "records"), *_of("passes", "on_gpus"), *_of("kernels", "by_name", "choice")),
        (
            'if len(x) != 1 or product != "mm" or keep_product or not _usable(x[0]):',
            "if len(x) != 1 or keep_product or not _usable(x[0]):",
        ),
    ),
)

FRONT_END = (
    Mutation(
        "graphs are cached whatever the order",
        "backend.py",
        "settings.policy, patterns, settings.order, tables, settings.schedule",
        "settings.policy, patterns, tables, settings.schedule",
        (*_of("frontend", "backend"), *_of("robustness", "caches")),
    ),
    Mutation(
        "a time limit of no seconds",
        "options.py",
        "not value > 0:",
        "not value >= 0:",
        _of("frontend", "config", "backend"),
    ),
    Mutation(
        "graph breaks of earlier compilations are reported",
        "inspection.py",
        "torch_internals.graph_break_counts() - before",
        "torch_internals.graph_break_counts()",
        (*_of("frontend", "inspection"), *PROGRAMS),
    ),
    Mutation(
        "a report read from JSON has lists in its plans",
        "report.py",
        'PlanShape(**{k: _tuples(v) for k, v in data["plan"].items()})',
        'PlanShape(**data["plan"])',
        _of("frontend", "report", "page"),
    ),
    Mutation(
        "a scatter on the last dim but one is cut along rows",
        "ops.py",
        "if axis == len(shape) - 1:",
        "if axis == len(shape):",
        DENSE[1:],
    ),
)

UPDATE = _of("ops", "reduce_update_gather")
OPTIMIZERS = (
    Mutation(
        "a prepared step does not ask the other ranks",
        "again.py",
        "        self._agree(args)\n",
        "",
        _of("kernels", "prepared_steps"),
    ),
    Mutation(
        "a prepared step takes gradients that begin anywhere",
        "again.py",
        "return None if reduce(or_, found) % ALIGNED else found",
        "return found",
        _of("kernels", "prepared_steps"),
    ),
    Mutation(
        "numbers on the device go the fastest way, of torch too",
        "call.py",
        "if (way := ways[t.name]).fused)",
        "if (way := ways[t.name]))",
        _of("kernels", "prepared_steps"),
    ),
    Mutation(
        "the norm is computed before all sums are there",
        "clipped_update.py",
        "if count_sum(counter) == items - 1:",
        "if count_sum(counter) == tl.maximum(items - 2, 0):",
        _of("kernels", "interpreted_optimizer"),
    ),
    Mutation(
        "gradients are not scaled by the factor of their norm",
        "clipped_update.py",
        "* (factor * ratio(rates, row, 10))",
        "* ratio(rates, row, 10)",
        _of("kernels", "interpreted_optimizer"),
    ),
    Mutation(
        "gradients of the last rank are not added",
        "optimizer.cpp",
        "for (int r = 0; r < w.world; ++r) {",
        "for (int r = 0; r < w.world - 1; ++r) {",
        UPDATE,
    ),
    Mutation(
        "the variance of Adam is not corrected",
        "optimizer.cpp",
        "(std::sqrt(second) * root + eps)",
        "(std::sqrt(second) + eps)",
        UPDATE,
    ),
    Mutation(
        "a gradient that some ranks lack is none on all",
        "agreement.py",
        "if not bad and len(set(codes)) > 1:",
        "if not bad and len(set(codes)) > 2:",
        UPDATE,
    ),
    Mutation(
        "a tensor is adapted by the norms of one rank",
        "update_executor.py",
        "totals = [sum(values) for values in zip(*of_ranks, strict=True)]",
        "totals = [values[0] for values in zip(*of_ranks, strict=True)]",
        UPDATE,
    ),
    Mutation(
        "clipped steps go on without their factor",
        "update_executor.py",
        "self.work.scale = clip(self.norm, args.max_norm)",
        "self.work.scale = 1.0",
        UPDATE,
    ),
    Mutation(
        "an updated batch does not wait for those before",
        "in_backward.py",
        "while self._next < len(self._batches) and self._missing[self._next] == 0:",
        "if self._missing[number] == 0:",
        _of("optim", "in_backward"),
    ),
    Mutation(
        "the state of another group's slice is loaded",
        "state.py",
        "if span is not None and tuple(span) != (start, stop, numel):",
        "if span is not None and len(span) != 3:",
        _of("optim", "optimizers"),
    ),
    Mutation(
        "a step that can be captured has the numbers of the next update",
        "on_device.py",
        "numbers_at(terms_of(options), int(t) + 1,",
        "numbers_at(terms_of(options), int(t) + 2,",
        _of("optim", "optimizers"),
    ),
    Mutation(
        "a sum of 16 bits is not rounded before the update",
        "optimizer.cpp",
        "if (w.rounds && of_grad != af::kFloat32) {",
        "if (false) {",
        _of("passes", "optimizer_updates"),
    ),
    Mutation(
        "squares of the directions of tiles are added up twice",
        "whole_update.py",
        "found[at] = [0.0] * width",
        "found[at] = [*found[at]][:1] + [0.0] * (width - 1)",
        (*_of("ops", "all_reduce_update"), *_of("passes", "lamb_updates")),
    ),
    Mutation(
        "updates go on without the factor of clipping",
        "whole_update.py",
        "self._run(whole, kernels.UPDATE, at, scale=scale)",
        "self._run(whole, kernels.UPDATE, at)",
        (*_of("ops", "all_reduce_update"), *_of("passes", "clipped_updates")),
    ),
    Mutation(
        "a norm of multiples of gradients is that of the gradients",
        "update_clip.py",
        "if len(weights) != 1 or any(",
        "if any(",
        _of("passes", "clipped_updates"),
    ),
    Mutation(
        "a factor is not scaled as the norm is",
        "update_clip.py",
        "norm = N * sympy.sqrt(weights.pop())",
        "norm = N",
        _of("passes", "clipped_updates"),
    ),
    Mutation(
        "sums that something else reads are not handed out",
        "update_rule.py",
        "return any(user not in needed and user not in ends for node in needed for user in node.users)",
        "return False",
        (*_of("passes", "clipped_updates"), *_of("passes", "optimizer_updates")),
    ),
    Mutation(
        "the norm of any tensor is that of the parameter",
        "update_rule.py",
        'algebra.measured == old_p, "the norm',
        'algebra.measured is not None, "the norm',
        _of("passes", "lamb_updates"),
    ),
    Mutation(
        "LAMB is guarded whatever its ratio where norms are 0",
        "update_rule.py",
        "guarded = all(at.is_finite is not False and equal(at, lr) for at in at_zeros)",
        "guarded = True",
        _of("passes", "lamb_updates"),
    ),
    Mutation(
        "a decay besides the norm of LAMB",
        "update_rule.py",
        "norms is not NORMS or equal(keep",
        "True or equal(keep",
        _of("passes", "lamb_updates"),
    ),
    Mutation(
        "a sum of 16 bits is not rounded before the update of a slice",
        "sliced_update.py",
        "out_width=WIDTH, rounds=True,",
        "out_width=WIDTH, rounds=False,",
        _of("ops", "reduce_scatter_update_all_gather"),
    ),
    Mutation(
        "the slice of a whole state begins at its start",
        "sliced_update.py",
        "WIDTH * (self.args.offset(state) + part.at)",
        "WIDTH * part.at",
        (*_of("ops", "reduce_scatter_update_all_gather"), *_of("passes", "sliced_updates")),
    ),
    Mutation(
        "a new slice that something else reads is not computed",
        "sliced_update.py",
        "if not written and other is not None:",
        "if other is None:",
        _of("passes", "sliced_updates"),
    ),
    Mutation(
        "a piece is what was stored at another place",
        "pieces.py",
        "same = scatter.target is SCATTER and stored(scatter) == piece",
        "same = scatter.target is SCATTER",
        _of("passes", "sliced_updates"),
    ),
    Mutation(
        "of two ops the one is taken that saves less",
        "fuse.py",
        "best = saved.index(max(saved))",
        "best = saved.index(min(saved))",
        _of("passes", "optimizer_updates"),
    ),
)

LAUNCHES = (
    Mutation(
        "what was prepared runs calls of another group of that name",
        "direct.py",
        "if made is not None and made.group() is _group(given[-3]):",
        "if made is not None:",
        _of("ops", "direct"),
    ),
    Mutation(
        "fused ops are ordered by memory",
        "compiler.py",
        "ordered = [node for node in nodes if is_ours(node) or contains_collective(node)]",
        "ordered = [node for node in nodes if contains_collective(node)]",
        _of("robustness", "order"),
    ),
    Mutation(
        "a launch again has the tensor map of the first",
        "gemm.py",
        "    note(params, name, matrix, is_map=True)\n",
        "",
        _of("kernels", "prepared"),
    ),
    Mutation(
        "a call like one before has its numbers of indices",
        "again.py",
        'words[self._first + 3 :: WORDS_TABLE] = array("q", map(Tensor.numel, indices))',
        "pass",
        _of("kernels", "exchange_ways"),
    ),
)

SCHEDULES = (
    Mutation(
        "any number of rows that is a symbol is cut",
        "joint.py",
        "all(guard_multiple(joint, size, world) for size in fit.assumed)",
        "all(guard_multiple(joint, size, 1) for size in fit.assumed)",
        _of("schedules", "ranks"),
    ),
    Mutation(
        "a value that differs between ranks is cut",
        "split.py",
        "for source in node.all_input_nodes) and replicated(node):",
        "for source in node.all_input_nodes):",
        _of("schedules", "split"),
    ),
    Mutation(
        "an operand with rows is read whole",
        "slices.py",
        "return place if place >= 0 and same_size(given[place], whole[dim]) and given[place] != 1 else None",
        "return None",
        _of("schedules", "split"),
    ),
    Mutation(
        "a reduction over the cut dim is computed on slices",
        "slices.py",
        "    if dim in reduced:\n",
        "    if False:\n",
        _of("schedules", "split"),
    ),
    Mutation(
        "a view cuts a dim into unequal parts",
        "slices.py",
        "return place if fit(size) and (alike or equal) else None",
        "return place",
        _of("schedules", "split"),
    ),
    Mutation(
        "constants are no part of a proof",
        "layouts.py",
        "return _digest([str(node.target), _on_any_rank(plain)])",
        "return _digest([str(node.target)])",
        _of("schedules", "layouts", "ranks"),
    ),
    Mutation(
        "unwritten memory counts as replicated",
        "layouts.py",
        "known = target.namespace in _KNOWN and target not in _UNWRITTEN",
        "known = target.namespace in _KNOWN",
        _of("schedules", "layouts"),
    ),
    Mutation(
        "ranks with other proofs run what they compiled",
        "agreeing.py",
        "if any(digest != proof.digest for digest, _ in of_ranks):",
        "if False:",
        _of("schedules", "ranks"),
    ),
    Mutation(
        "results of a tail are replicated whatever its operands are",
        "layouts.py",
        'same = not is_product and all(self.replicated(operand) for operand in given["tail_operands"])',
        "same = not is_product",
        _of("schedules", "ranks"),
    ),
)

MUTATIONS = (
    *LAUNCHES,
    *PASSES,
    *SCHEDULES,
    *PLANS,
    *EXECUTORS,
    *OPTIMIZERS,
    *PROTOCOL,
    *KERNELS,
    *CHOICE,
    *FRONT_END,
)
