"""Reading and changing FX graphs: collectives, layouts, new nodes, listings."""
