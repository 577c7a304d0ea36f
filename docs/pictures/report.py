"""Makes `report.png`, a picture of the page that `report.save_html` writes. Needs Chromium and Selenium.

python docs/pictures/report.py
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from selenium import webdriver
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

import autofuse

WORLD, TOKENS, WIDTH, HIDDEN = 4, 4096, 1024, 3584


class Feedforward(nn.Module):
    """A sequence-parallel MLP: tokens are gathered, multiplied, and scattered again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, HIDDEN // WORLD))
        self.down = nn.Parameter(torch.randn(HIDDEN // WORLD, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """`x: [TOKENS / WORLD, WIDTH]` -> the same."""
        group = dist.group.WORLD
        largest = funcol.all_reduce(x.detach().abs().amax(), "max", group)
        hidden = F.silu(funcol.all_gather_tensor_autograd(x / largest, 0, group) @ self.up)
        return x + funcol.reduce_scatter_tensor_autograd(hidden @ self.down, "sum", 0, group)


def make_report() -> autofuse.Report:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    model = nn.Sequential(Feedforward(), Feedforward())
    x = torch.randn(TOKENS // WORLD, WIDTH, requires_grad=True)
    with autofuse.config.patch(policy="always"):
        report = autofuse.explain(model, backward=True)(x)
    here = str(Path(__file__).parent)
    return autofuse.Report.from_json(report.to_json().replace(here, "/home/you/model"))


def photograph(page: Path, picture: Path) -> None:
    """The top of the page with one site open, 1400 pixels wide."""
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    # Named here, the driver is not looked for in the network.
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    size = {"width": 1400, "height": 1250, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    browser.find_element("css selector", "#s2 .row").click()
    browser.save_screenshot(str(picture))
    browser.quit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        make_report().save_html(page)
        photograph(page, Path(__file__).with_suffix(".png"))
