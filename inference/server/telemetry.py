"""Traces by OpenTelemetry's ASGI instrumentation, which is not installed by default."""

from __future__ import annotations

from starlette.types import ASGIApp

from nvt_torchrec.base.errors import SettingsError

_PACKAGES = (
    "opentelemetry-instrumentation-asgi opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
)


def traced(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with a span for each request, sent by OTLP over HTTP.

    OpenTelemetry reads its settings from environment variables: OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and others.

    Raises:
        SettingsError: A package is missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"--otel: {error}", f"pip install {_PACKAGES}") from error
    provider = TracerProvider()  # sends the remaining spans at exit
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetryMiddleware(
        app, excluded_urls="/health,/ready,/metrics", tracer_provider=provider
    )
