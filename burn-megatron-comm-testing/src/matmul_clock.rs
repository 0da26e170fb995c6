//! A subscriber that adds the time of matrix multiplications to the clock of a simulated network link.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::Link;

/// A `tracing` subscriber that adds the compute time of matrix multiplications to the clock of a [`Link`]. It includes
/// the matrix multiplications that linear layers compute on this thread.
///
/// With a virtual clock, the share of the transfer time that is hidden behind computation can be measured even if the
/// ranks share CPU cores. See [`Link::with_virtual_clock`].
#[derive(Debug)]
pub struct MatmulClock {
    /// The network link of this rank.
    pub link: Arc<Link>,
    /// The simulated compute speed, in floating-point operations per second.
    pub flops_per_second: f64,
}

/// The number of floating-point operations of a span, or `None` if the span is not a matrix multiplication.
struct Flops(Option<u64>);

impl Visit for Flops {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "flops" {
            self.0 = Some(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

impl Subscriber for MatmulClock {
    /// Accepts the spans created by `burn-megatron/src/nn/product_span.rs`.
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        matches!(metadata.name(), "product" | "weight_gradient")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut flops = Flops(None);
        span.record(&mut flops);
        if let Some(flops) = flops.0 {
            let seconds = flops as f64 / self.flops_per_second;
            self.link.advance(Duration::from_secs_f64(seconds));
        }
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
