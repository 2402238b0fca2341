"""What is served follows the schedulers: their model, its bundle, its language, its sampling defaults.

Owns the language at hand. Whoever runs `follow` has `inference` serve what the schedulers have, and a newer model once they have that.
What cannot be fetched is asked for again; what was fetched and cannot be read stays so, and another model is waited for.
"""

import asyncio
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry
from trivet_chassis.clock import Clock
from trivet_checkpoint import ModelBundle
from trivet_proto.errors import TrivetError, invalid

from trivet_frontend.chat import compiled
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
        self._template = read_template(settings.chat_template)
        self._language: ModelLanguage | None = None
        self._digest: bytes | None = None
        self._unreadable: bytes | None = None
        self._metrics: FrontendMetrics | None = None
        self.refusal: TrivetError | None = None
        """Why the first model that came cannot be served, where the settings make that the end."""

    async def follow(self) -> None:
        """Runs until cancelled."""
        changes = self._engine.changes
        while True:
            seen, model = changes.count, self._engine.model
            if model is not None and model.bundle_digest not in (self._digest, self._unreadable):
                try:
                    bundle = await self._engine.fetch_bundle(model)
                except TrivetError as error:
                    logger.warning("the model cannot be served yet: %s", error.message)
                    await asyncio.sleep(FETCH_RETRY_SECONDS)
                    continue
                self._serve_or_refuse(model, bundle)
                changes.note()  # it can be served now, or never
            await changes.after(seen)

    def close(self) -> None:
        if self._language is not None:
            self._language.close()

    def _serve_or_refuse(self, model: ModelDescription, bundle: bytes) -> None:
        try:
            self._serve(model, ModelBundle.from_bytes(bundle))
            self._unreadable = None
        except TrivetError as error:
            self._refuse(model, error.message)
        except Exception as error:
            logger.exception("the model that the scheduler gave cannot be read")
            self._refuse(model, f"the model {model.name} cannot be read: {error!r}")

    def _refuse(self, model: ModelDescription, reason: str) -> None:
        self._unreadable = model.bundle_digest
        if self._settings.exit_on_unreadable_model and self._digest is None:
            self.refusal = invalid(reason)
        else:
            logger.error("this model is not served, another is waited for: %s", reason)

    def _serve(self, model: ModelDescription, bundle: ModelBundle) -> None:
        settings = self._settings
        language = ModelLanguage(
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
            language=language,
            defaults=defaults,
            system_fingerprint=f"trivet-{software_version()}-{bundle.digest.hex()[:8]}",
        )
        self._inference.serve(served, self._metrics)
        self.close()  # the former one, which no request asks from now on
        self._language = language
        self._digest = model.bundle_digest
        logger.info("serving %s, context %d tokens, sampling defaults %s", ", ".join(names), model.max_model_len, defaults)


def read_template(path: str) -> str | None:
    """The template of the setting, None where that is empty. Raises INVALID_ARGUMENT with the file's name for what is none."""
    if not path:
        return None
    try:
        template = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"the chat template {path} cannot be read: {error}", "chat_template") from error
    try:
        compiled(template, called=f"the chat template {path}")
    except TrivetError as error:
        raise invalid(f"{error.message}; mend it, or leave chat_template out for the model's own", "chat_template") from None
    return template
