"""Networks are built in `hwnas.networks.build`; cards of earlier versions import this name."""

from hwnas.networks.build import build as build
from hwnas.networks.build import register as register
