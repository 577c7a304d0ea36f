"""Functions that read and change FX graphs: collectives, layouts, new nodes, listings."""
