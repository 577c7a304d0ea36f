"""Which legal sites are fused: the cost model, its tables, and the rule of policy `auto`."""
