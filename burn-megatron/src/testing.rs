//! Helpers for the tests of several modules.

use std::sync::Arc;

use parking_lot::Mutex;

/// Returns the warnings that `body` logs in this thread.
pub(crate) fn warnings(body: impl FnOnce()) -> Vec<String> {
    // With a single subscriber, a thread of another test without a subscriber could reach an event first and
    // disable that event for all threads.
    let _second = tracing::Dispatch::new(Warnings::default());
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), body);
    warnings.0.lock().clone()
}

/// Collects the text of warnings: the message, then the fields.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
        tracing::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = String::new();
        event.record(
            &mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| match field.name() {
                "message" => text.insert_str(0, &format!("{value:?}")),
                name => text.push_str(&format!(" {name}={value:?}")),
            },
        );
        let mut warnings = self.0.lock();
        warnings.push(text);
    }
    fn enter(&self, _: &tracing::Id) {}
    fn exit(&self, _: &tracing::Id) {}
}
