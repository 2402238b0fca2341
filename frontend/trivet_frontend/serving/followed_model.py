"""What is served follows the schedulers: their model, its bundle, its language, its sampling defaults.

Owns the language at hand. Whoever runs `follow` has `inference` serve what the schedulers have, and a newer model once they have that.
"""

import asyncio
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry
from trivet_chassis.clock import Clock
from trivet_checkpoint import ModelBundle
from trivet_proto.errors import TrivetError, invalid

from trivet_frontend.config import FrontendSettings
from trivet_frontend.engine import EngineClient, ModelDescription, software_version
from trivet_frontend.serving.inference import Inference
from trivet_frontend.serving.metrics import FrontendMetrics
from trivet_frontend.serving.model import ModelLanguage
from trivet_frontend.serving.sampling import SamplingDefaults, defaults_from
from trivet_frontend.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

FETCH_RETRY_SECONDS = 1.0


class FollowedModel:
    """Keeps an `Inference` in step with its engine."""

    def __init__(
        self, engine: EngineClient, inference: Inference, settings: FrontendSettings, registry: CollectorRegistry, *, clock: Clock
    ) -> None:
        """Raises INVALID_ARGUMENT for a template that cannot be read."""
        self._engine = engine
        self._inference = inference
        self._settings = settings
        self._registry = registry
        self._clock = clock
        self._template = _read_template(settings.chat_template)
        self._language: ModelLanguage | None = None
        self._digest: bytes | None = None
        self._metrics: FrontendMetrics | None = None

    async def follow(self) -> None:
        """Runs until cancelled."""
        changes = self._engine.changes
        while True:
            seen, model = changes.count, self._engine.model
            if model is not None and model.bundle_digest != self._digest:
                try:
                    await self._serve(model)
                except TrivetError as error:
                    await self._put_off(error.message)
                    continue
                except Exception:
                    logger.exception("the model that the scheduler gave cannot be read")
                    await self._put_off("it cannot be read")
                    continue
                changes.note()  # it can be served now
            await changes.after(seen)

    def close(self) -> None:
        if self._language is not None:
            self._language.close()

    async def _put_off(self, reason: str) -> None:
        logger.warning("the model cannot be served yet: %s", reason)
        await asyncio.sleep(FETCH_RETRY_SECONDS)

    async def _serve(self, model: ModelDescription) -> None:
        bundle = ModelBundle.from_bytes(await self._engine.fetch_bundle(model))
        settings = self._settings
        self.close()
        self._language = ModelLanguage(
            bundle,
            model,
            template=self._template,
            allow_request_template=settings.trust_request_chat_template,
            threads=settings.tokenizer_threads,
        )
        names = tuple(name for name in settings.served_model_name if name) or (model.name, *model.aliases)
        defaults = SamplingDefaults()
        if settings.generation_config == "auto":
            defaults = defaults_from(bundle.json("generation_config.json"))
        if self._metrics is None:
            self._metrics = FrontendMetrics(self._registry, model_name=names[0], loads=self._engine.loads)
        served = ServedModel(
            names=names,
            root=model.name,
            created=int(self._clock.wall()),
            description=model,
            language=self._language,
            defaults=defaults,
            system_fingerprint=f"trivet-{software_version()}-{bundle.digest.hex()[:8]}",
        )
        self._inference.serve(served, self._metrics)
        self._digest = model.bundle_digest
        logger.info("serving %s, context %d tokens, sampling defaults %s", ", ".join(names), model.max_model_len, defaults)


def _read_template(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"the chat template {path} cannot be read: {error}", "chat_template") from error
