from pliant.frontend.onnx_ops_activation import Table

TRAINING: Table = {}
