from pliant.frontend.onnx_ops_activation import Table

QUANTIZED: Table = {}
