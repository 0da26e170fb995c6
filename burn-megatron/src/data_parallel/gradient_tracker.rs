//! Tracks the parameters that a step has used, and the gradients that are still expected.

use std::collections::{BTreeMap, BTreeSet};

/// The uses of each parameter in a step.
#[derive(Clone, Debug)]
pub(super) struct GradientTracker {
    parameters: Vec<ParameterUse>,
    /// The number of the current forward.
    forward: u64,
    stage: Option<usize>,
    /// The number of forwards of each stage.
    forwards: BTreeMap<Option<usize>, usize>,
    /// The number of backwards of a module without stages.
    backwards: usize,
    ended_stages: BTreeSet<usize>,
    /// Whether no forward of any stage follows in this step.
    all_ended: bool,
}

#[derive(Clone, Debug, Default)]
struct ParameterUse {
    /// The number of uses whose gradient has not been received yet.
    pending: usize,
    /// The number of the last forward that used it, and the number of uses in that forward.
    last_forward: (u64, usize),
    /// The maximum number of uses in one forward.
    most_in_forward: usize,
    stages: BTreeSet<usize>,
    /// Whether a gradient was received.
    has_gradient: bool,
}

impl GradientTracker {
    pub fn new(parameters: usize) -> Self {
        Self {
            parameters: vec![ParameterUse::default(); parameters],
            forward: 0,
            stage: None,
            forwards: BTreeMap::new(),
            backwards: 0,
            ended_stages: BTreeSet::new(),
            all_ended: false,
        }
    }

    /// Begins a forward. `stage` is the pipeline stage, if there are stages.
    pub fn begin_forward(&mut self, stage: Option<usize>) {
        self.forward += 1;
        self.stage = stage;
        *self.forwards.entry(stage).or_default() += 1;
    }

    /// Returns the number of micro-batches that were started.
    pub fn micro_batches(&self) -> usize {
        self.forwards.values().copied().max().unwrap_or(0)
    }

    /// Records that no further forward of `stage` follows in this step. `None`: no further forward of any stage
    /// follows.
    pub fn end_forwards(&mut self, stage: Option<usize>) {
        match stage {
            Some(stage) => {
                self.ended_stages.insert(stage);
            }
            None => self.all_ended = true,
        }
    }

    /// Records that a forward uses a parameter. One gradient is then expected for this use.
    pub fn expect(&mut self, index: usize) {
        let used = &mut self.parameters[index];
        used.pending += 1;
        used.last_forward = match used.last_forward {
            (forward, uses) if forward == self.forward => (forward, uses + 1),
            _ => (self.forward, 1),
        };
        used.most_in_forward = used.most_in_forward.max(used.last_forward.1);
        used.stages.extend(self.stage);
    }

    /// Records that the gradient of one use of a parameter was received.
    pub fn complete(&mut self, index: usize) {
        self.parameters[index].pending -= 1;
        self.parameters[index].has_gradient = true;
    }

    pub fn is_pending(&self, index: usize) -> bool {
        self.parameters[index].pending > 0
    }

    /// Returns the number of uses of the parameter in the current forward.
    pub fn uses_in_forward(&self, index: usize) -> usize {
        match self.parameters[index].last_forward {
            (forward, uses) if forward == self.forward => uses,
            _ => 0,
        }
    }

    /// Whether a gradient of the parameter was received.
    pub fn has_gradient(&self, index: usize) -> bool {
        self.parameters[index].has_gradient
    }

    /// Ends a backward of a module without stages.
    pub fn end_backward(&mut self) {
        self.backwards += 1;
    }

    /// Returns the maximum number of uses of the parameter in one forward so far.
    pub fn uses_per_forward(&self, index: usize) -> usize {
        self.parameters[index].most_in_forward
    }

    /// Whether no further gradient of the parameter is expected in this step.
    pub fn is_final(&self, index: usize) -> bool {
        let ParameterUse {
            pending, stages, ..
        } = &self.parameters[index];
        let all_stages_ended = !stages.is_empty() && stages.is_subset(&self.ended_stages);
        *pending == 0 && (self.all_ended || all_stages_ended)
    }

    /// If a forward had no backward, returns a parameter that still expects gradients, and the number of expected
    /// gradients. If every forward had a backward, returns `None`, because the loss does not depend on the remaining
    /// uses.
    pub fn missing_backward(&self) -> Option<(usize, usize)> {
        let forwards = self.forwards.get(&None).copied().unwrap_or(0);
        if forwards <= self.backwards {
            return None;
        }
        let mut uses = self.parameters.iter().map(|used| used.pending).enumerate();
        uses.find(|(_, pending)| *pending > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gradient_is_final_when_its_stages_have_ended_and_no_use_is_pending() {
        let mut tracker = GradientTracker::new(2);
        for stage in [0, 3] {
            tracker.begin_forward(Some(stage));
            tracker.expect(0);
        }
        tracker.end_forwards(Some(0));
        tracker.complete(0);
        assert!(!tracker.is_final(0), "stage 3 uses it");
        tracker.end_forwards(Some(3));
        assert!(!tracker.is_final(0), "a use is pending");
        tracker.complete(0);
        assert!(tracker.is_final(0));
        assert!(!tracker.is_final(1), "a later stage may use it");
        tracker.end_forwards(None);
        assert!(tracker.is_final(1) && !tracker.has_gradient(1));
        assert!(tracker.has_gradient(0));
    }

    #[test]
    fn uses_are_counted_by_forward() {
        let mut tracker = GradientTracker::new(1);
        for _ in 0..3 {
            tracker.begin_forward(None);
            tracker.expect(0);
            tracker.expect(0);
        }
        assert_eq!(tracker.uses_per_forward(0), 2);
        for _ in 0..3 {
            assert_eq!(tracker.missing_backward(), Some((0, 6)));
            tracker.end_backward();
        }
        assert_eq!(tracker.missing_backward(), None);
    }
}
