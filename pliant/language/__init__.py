"""Language models: weights from files, graphs, tokens, and the loop that generates."""
