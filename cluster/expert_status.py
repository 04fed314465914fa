"""Asks the application's router what it knows of experts, for `tandem experts`."""

from __future__ import annotations

import asyncio

from cluster.application import Applications
from cluster.config import ClusterConfig, WireSection, parse_config
from cluster.errors import StartupError
from cluster.members import ask
from cluster.messages import Address, AskExperts, ExpertBalance
from cluster.ray_services import ApplicationKeys
from cluster.serve_details import config_of
from cluster.wire import Identity, new_incarnation


class Asker:
    """Of one application, as often as wanted."""

    def __init__(self, name: str, dashboard: str) -> None:
        """StartupError where no such application runs."""
        application = Applications(dashboard).find(name)
        if application is None:
            raise StartupError(f"no application {name!r} runs; `tandem up` starts one")
        tree = config_of(application)
        self._wire = (ClusterConfig() if tree is None else parse_config(tree)).wire
        self._name, self._keys = name, ApplicationKeys(name)

    def ask(self) -> ExpertBalance:
        """StartupError while there is no router; WorkerLost if it does not answer."""
        record = self._keys.router()
        if record is None:
            raise StartupError(f"application {self._name!r} has published no router yet")
        identity = Identity("caller", new_incarnation(), self._keys.secret())
        return asyncio.run(ask_experts(record.address, identity, self._wire))


async def ask_experts(router: Address, identity: Identity, config: WireSection) -> ExpertBalance:
    """WorkerLost if it does not answer."""
    return await ask(router, AskExperts(), ExpertBalance, identity, config, label="the router")
