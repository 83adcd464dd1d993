"""Tells other tools of a verified run, such as MLflow and TensorBoard: python -m hwnas.log"""
