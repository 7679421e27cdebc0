"""Which peer holds which stage: pure functions of a snapshot of peer records, to a choice and its reason in words."""

from meshd.placement.moves import RULES, Move, Rules, Watch, best_move, confirmed
from meshd.placement.newcomers import Choice, Settlement, choose_stage, settle

__all__ = [
    "RULES",
    "Choice",
    "Move",
    "Rules",
    "Settlement",
    "Watch",
    "best_move",
    "choose_stage",
    "confirmed",
    "settle",
]
