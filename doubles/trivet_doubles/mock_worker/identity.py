"""What the mock worker says of itself and what it makes of a configuration: constant over its life."""

import os
from dataclasses import dataclass, field

from trivet_chassis.metrics import software_version
from trivet_checkpoint import ModelBundle
from trivet_proto.revision import SCHEMA
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_doubles.kv_layers import Layers, kv_layers
from trivet_doubles.mock_worker.config import MockWorkerSettings
from trivet_doubles.mock_worker.stepping import MockRunner
from trivet_doubles.model import DoubleModel
from trivet_doubles.tokens import TokenLaw


@dataclass(frozen=True)
class Identity:
    """One replica."""

    settings: MockWorkerSettings
    card: types_pb2.ModelCard
    bundle: ModelBundle
    law: TokenLaw
    layers: Layers
    instance: bytes = field(default_factory=lambda: os.urandom(16))

    def hello(self) -> worker_pb2.WorkerHello:
        settings = self.settings
        rank = worker_pb2.RankResources(
            rank=0,
            layers=self.layers,
            kv_bytes_available=settings.num_kv_blocks * sum(layer.spec.page_size_bytes for layer in self.layers),
            num_kv_blocks=settings.num_kv_blocks,
            device="none",
            attention_backend="mock",
        )
        return worker_pb2.WorkerHello(
            hello=types_pb2.Hello(name=settings.replica_name, instance=self.instance, schema=SCHEMA, version=software_version()),
            role=types_pb2.REPLICA_ROLE_BOTH,
            parallel=worker_pb2.ParallelSizes(tensor=1, pipeline=1, data=1, prefill_context=1, decode_context=1),
            card=self.card,
            ranks=[rank],
            limits=worker_pb2.WorkerLimits(
                block_size=settings.block_size,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=self.card.max_model_len,
            ),
            abilities=worker_pb2.WorkerAbilities(
                steps_in_flight=settings.steps_in_flight, run_ahead=settings.run_ahead, zeroes_blocks=True
            ),
        )

    def runner(self, config: types_pb2.KvCacheConfig) -> MockRunner:
        """An empty pool of the configured shape. Raises FAILED_PRECONDITION for what cannot be simulated."""
        return MockRunner(config, self.law, max_num_seqs=self.settings.max_num_seqs, max_model_len=self.card.max_model_len)


def identity_of(settings: MockWorkerSettings, model: DoubleModel) -> Identity:
    """Raises INVALID_ARGUMENT for settings that the model does not allow."""
    context = settings.context(model.context)
    return Identity(
        settings=settings,
        card=model.card(name=settings.served_model_name, max_model_len=context, block_size=settings.block_size),
        bundle=model.bundle,
        law=model.law(end_every=settings.end_every),
        layers=kv_layers(settings.kv_spec, settings.block_size),
    )
