"""Networks are built in `hwnas.networks.build`; cards of earlier versions import this name."""

