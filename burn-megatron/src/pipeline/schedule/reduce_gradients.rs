//! Inserts the reductions of gradients between the other actions of a schedule.

use std::collections::BTreeMap;

use super::{Action, ActionKind, Schedule};

impl Schedule {
    /// Inserts a [`ReduceGradients`](ActionKind::ReduceGradients) action for each stage, directly after the last
    /// forward of the stage. If this forward is paired, the action follows the pair. This is the earliest valid
    /// position. Existing reductions are replaced.
    pub fn with_reduce_gradients(self) -> Self {
        self.with_reductions_after(|_, actions| {
            let forwards = actions.iter().enumerate();
            forwards
                .filter(|(_, action)| action.kind.is_forward())
                .map(|(position, action)| {
                    // No action may be between the two of a pair.
                    let is_paired = action.kind == ActionKind::PairedForward;
                    (action.stage, position + usize::from(is_paired))
                })
                .collect()
        })
    }

    /// Returns this schedule with reductions at given positions. `after(rank, actions)` returns, for each
    /// stage, the index of the action that the reduction follows.
    pub(super) fn with_reductions_after(
        mut self,
        after: impl Fn(usize, &[Action]) -> BTreeMap<usize, usize>,
    ) -> Self {
        for (rank, actions) in self.ranks.iter_mut().enumerate() {
            actions.retain(|action| action.kind != ActionKind::ReduceGradients);
            let mut stages_at: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
            for (stage, position) in after(rank, actions) {
                stages_at.entry(position).or_default().push(stage);
            }
            let with_reductions = actions.iter().enumerate().flat_map(|(position, action)| {
                let stages = stages_at.remove(&position).unwrap_or_default();
                let reductions = stages.into_iter().map(Action::reduce_gradients);
                std::iter::once(*action).chain(reductions)
            });
            *actions = with_reductions.collect();
        }
        self
    }

    /// Whether any rank reduces gradients.
    pub(super) fn has_reductions(&self) -> bool {
        let mut actions = self.ranks.iter().flatten();
        actions.any(|action| action.kind == ActionKind::ReduceGradients)
    }
}
