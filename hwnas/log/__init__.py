"""Tells other tools of a verified run, such as MLflow and TensorBoard: hwnas log"""
