"""The choice of the legal sites that are fused: cost model, device tables, the rule of policy `auto`."""
