"""Who trains together while a run goes on: ranks that stop answering are taken out, new ones are let in."""

from loongforge_comm.members.board import JoinRequest
from loongforge_comm.members.config import MembershipConfig
from loongforge_comm.members.generation import Generation
from loongforge_comm.members.membership import Membership
from loongforge_comm.members.watching import RemovedError

__all__ = ["Generation", "JoinRequest", "Membership", "MembershipConfig", "RemovedError"]
