"""AdamW, Muon, BlockMuon, MuonBP and Periodic Row-wise Muon for plain and FSDP2-sharded parameters."""

from .algorithms import AdamW, BlockMuon, Muon, MuonBP, PeriodicRowMuon
from .routing import param_groups, routing_table
from .sharding.census import census

__all__ = [
    "AdamW",
    "BlockMuon",
    "Muon",
    "MuonBP",
    "PeriodicRowMuon",
    "census",
    "param_groups",
    "routing_table",
]
