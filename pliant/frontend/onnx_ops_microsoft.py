from pliant.frontend.onnx_ops_activation import Table

MICROSOFT: Table = {}
