//! Which parameters a step has used, and whose gradients are still to come.

use std::collections::{BTreeMap, BTreeSet};

/// The uses of each parameter in a step.
#[derive(Debug)]
pub(super) struct Uses {
    parameters: Vec<Use>,
    /// The forward that is under way, numbered.
    forward: u64,
    stage: Option<usize>,
    /// Forwards of each stage.
    forwards: BTreeMap<Option<usize>, usize>,
    /// Backwards of a module without stages.
    backwards: usize,
    closed: BTreeSet<usize>,
    /// No forward at all will come.
    all_closed: bool,
}

#[derive(Clone, Debug, Default)]
struct Use {
    /// Uses whose backward has not come yet.
    open: usize,
    /// The last forward that used it, and how often.
    last: (u64, usize),
    /// The most uses in one forward.
    most: usize,
    stages: BTreeSet<usize>,
    /// Whether a gradient came.
    came: bool,
}

impl Uses {
    pub fn new(parameters: usize) -> Self {
        Self {
            parameters: vec![Use::default(); parameters],
            forward: 0,
            stage: None,
            forwards: BTreeMap::new(),
            backwards: 0,
            closed: BTreeSet::new(),
            all_closed: false,
        }
    }

    /// A forward begins, of a stage where there are stages.
    pub fn begin(&mut self, stage: Option<usize>) {
        self.forward += 1;
        self.stage = stage;
        *self.forwards.entry(stage).or_default() += 1;
    }

    /// The micro-batches that were begun.
    pub fn micro_batches(&self) -> usize {
        self.forwards.values().copied().max().unwrap_or(0)
    }

    /// No forward will come any more: of a stage, or at all.
    pub fn close(&mut self, stage: Option<usize>) {
        match stage {
            Some(stage) => {
                self.closed.insert(stage);
            }
            None => self.all_closed = true,
        }
    }

    /// A parameter is used.
    pub fn expect(&mut self, index: usize) {
        let used = &mut self.parameters[index];
        used.open += 1;
        used.last = match used.last {
            (forward, uses) if forward == self.forward => (forward, uses + 1),
            _ => (self.forward, 1),
        };
        used.most = used.most.max(used.last.1);
        used.stages.extend(self.stage);
    }

    /// The gradient of one use has come.
    pub fn complete(&mut self, index: usize) {
        self.parameters[index].open -= 1;
        self.parameters[index].came = true;
    }

    pub fn is_open(&self, index: usize) -> bool {
        self.parameters[index].open > 0
    }

    /// Whether a gradient of it came.
    pub fn has_gradient(&self, index: usize) -> bool {
        self.parameters[index].came
    }

    /// A backward of a module without stages is over.
    pub fn backward(&mut self) {
        self.backwards += 1;
    }

    /// How often a forward uses it, as far as is known.
    pub fn of_a_forward(&self, index: usize) -> usize {
        self.parameters[index].most
    }

    /// Whether no gradient will come any more.
    pub fn is_final(&self, index: usize) -> bool {
        let Use { open, stages, .. } = &self.parameters[index];
        let closed = !stages.is_empty() && stages.is_subset(&self.closed);
        *open == 0 && (self.all_closed || closed)
    }

    /// A parameter with open uses, and how many, if a forward had no backward. After all backwards a
    /// use that is still open has no part in the loss.
    pub fn without_backward(&self) -> Option<(usize, usize)> {
        let forwards = self.forwards.get(&None).copied().unwrap_or(0);
        if forwards <= self.backwards {
            return None;
        }
        let mut uses = self.parameters.iter().map(|used| used.open).enumerate();
        uses.find(|(_, open)| *open > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gradient_is_final_when_its_stages_are_closed_and_no_use_is_open() {
        let mut uses = Uses::new(2);
        for stage in [0, 3] {
            uses.begin(Some(stage));
            uses.expect(0);
        }
        uses.close(Some(0));
        uses.complete(0);
        assert!(!uses.is_final(0), "stage 3 uses it");
        uses.close(Some(3));
        assert!(!uses.is_final(0), "a use is open");
        uses.complete(0);
        assert!(uses.is_final(0));
        assert!(!uses.is_final(1), "nobody knows who will use it");
        uses.close(None);
        assert!(uses.is_final(1) && !uses.has_gradient(1));
        assert!(uses.has_gradient(0));
    }

    #[test]
    fn uses_are_counted_by_forward() {
        let mut uses = Uses::new(1);
        for _ in 0..3 {
            uses.begin(None);
            uses.expect(0);
            uses.expect(0);
        }
        assert_eq!(uses.of_a_forward(0), 2);
        for _ in 0..3 {
            assert_eq!(uses.without_backward(), Some((0, 6)));
            uses.backward();
        }
        assert_eq!(uses.without_backward(), None);
    }
}
