"""Quantise an ONNX file by NNCF; runs in an environment of its own: python nncf_file.py FP32 INT8 IMAGES.npy"""

from __future__ import annotations

import sys

import nncf
import numpy as np
import onnx

fp32, int8, images = sys.argv[1:]
model = onnx.load(fp32)
name = model.graph.input[0].name
batches = [{name: image[None]} for image in np.load(images)[::4]]
onnx.save(nncf.quantize(model, nncf.Dataset(batches), subset_size=len(batches)), int8)
