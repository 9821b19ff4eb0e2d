"""The published algorithms, one a file. Importing this package makes all of them known to groups by name."""

from .adago import AdaGO
from .adamw import AdamW
from .auon import AuON
from .block_muon import BlockMuon
from .dion import Dion
from .dion2 import Dion2
from .eight_bit import AdamW8bit, Muon8bit
from .lion import Lion
from .mars import MarsAdamW, MarsMuon
from .muon import Muon
from .muon_bp import MuonBP
from .muon_eq import MuonEq
from .normuon import NorMuon
from .periodic_row_muon import PeriodicRowMuon
from .periodic_sign_muon import PeriodicSignMuon
from .row_muon import RowMuon
from .scion import Scion
from .sgd import SGD

__all__ = [
    "SGD",
    "AdaGO",
    "AdamW",
    "AdamW8bit",
    "AuON",
    "BlockMuon",
    "Dion",
    "Dion2",
    "Lion",
    "MarsAdamW",
    "MarsMuon",
    "Muon",
    "Muon8bit",
    "MuonBP",
    "MuonEq",
    "NorMuon",
    "PeriodicRowMuon",
    "PeriodicSignMuon",
    "RowMuon",
    "Scion",
]
