"""The published algorithms, one a file. Importing this package makes all of them known to groups by name."""

from .adamw import AdamW
from .block_muon import BlockMuon
from .muon import Muon
from .muon_bp import MuonBP
from .periodic_row_muon import PeriodicRowMuon

__all__ = ["AdamW", "BlockMuon", "Muon", "MuonBP", "PeriodicRowMuon"]
