//! Errors of adding, removing and calling hooks.

/// An error when a hook is added, removed or called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookError {
    /// The trainer has no hook with this name.
    #[error("this trainer has no hook {name}: expected one of [{}]", .names.join(", "))]
    Unknown {
        /// The unknown name.
        name: String,
        /// The names of the hooks of the trainer.
        names: Vec<String>,
    },
    /// The trainer already has a hook with this name.
    #[error(
        "this trainer has a hook {0} already: remove it with without_hook, or use another name"
    )]
    Duplicate(String),
    /// A hook has skipped a step although the readings of step statistics are deferred.
    #[error(
        "a hook skips step {0}, which requires that each step is read before its update: return an error from \
         StepHook::deferral_error"
    )]
    DeferredSkip(usize),
}
