"""LiteRT: ONNX networks written as .tflite files, and such files read."""
