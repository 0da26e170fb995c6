//! The errors of adding, removing and calling hooks.

/// A hook that cannot be added or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookError {
    /// The trainer has no hook of this name.
    #[error("this trainer has no hook {name}: expected one of [{}]", .names.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// The hooks of the trainer.
        names: Vec<String>,
    },
    /// The trainer has a hook of this name.
    #[error(
        "this trainer has a hook {0} already: remove it with without_hook, or use another name"
    )]
    Duplicate(String),
    /// A hook skips a step whose reading is deferred.
    #[error(
        "a hook skips step {0}, which requires that each step is read before its update: return an error from \
         StepHook::deferral_error"
    )]
    DeferredSkip(usize),
}
