"""Networks: built from architectures or by timm, exported to ONNX, quantised."""
