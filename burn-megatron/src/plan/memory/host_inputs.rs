//! Which saved inputs of recomputed blocks are on the host, by the rules of their
//! [store](crate::nn::ActivationOffload).

use std::collections::HashMap;

use crate::nn::ActivationOffload;
use crate::pipeline::schedule::Action;
use crate::plan::profile::StageProfile;

/// The inputs of a rank that are on the host.
#[derive(Debug)]
pub(super) struct HostInputs {
    config: ActivationOffload,
    /// By stage and micro-batch.
    bytes: HashMap<(usize, usize), u64>,
    now: u64,
    /// The most so far.
    pub peak: u64,
}

impl HostInputs {
    pub fn new(config: ActivationOffload) -> Self {
        Self {
            config,
            bytes: HashMap::new(),
            now: 0,
            peak: 0,
        }
    }

    /// The forward of an action is over: all of its inputs but the last ones leave, as far as the budget has room. Returns
    /// their bytes.
    pub fn leave(&mut self, action: &Action, stage: &StageProfile) -> u64 {
        let last = stage.offloadable.len().saturating_sub(self.config.prefetch);
        let before = self.now;
        for bytes in &stage.offloadable[..last] {
            if self.now + bytes <= self.config.bytes {
                self.now += bytes;
            }
        }
        let left = self.now - before;
        self.peak = self.peak.max(self.now);
        self.bytes.insert((action.stage, action.micro_batch), left);
        left
    }

    /// The bytes of an action's inputs that are on the host.
    pub fn of(&self, action: &Action) -> u64 {
        let bytes = self.bytes.get(&(action.stage, action.micro_batch));
        bytes.copied().unwrap_or(0)
    }

    /// The backward of an action is over.
    pub fn take(&mut self, action: &Action) -> u64 {
        let bytes = self.bytes.remove(&(action.stage, action.micro_batch));
        let bytes = bytes.unwrap_or(0);
        self.now -= bytes;
        bytes
    }

    /// What an action with inputs on the host has on the device beside the others: the input that is on its way, in the
    /// forward as in the backward, where the `prefetch` inputs that are ahead have taken the place of the last ones.
    pub fn on_its_way(&self, action: &Action, stage: &StageProfile) -> u64 {
        match self.of(action) {
            0 => 0,
            _ => stage.offloadable.iter().copied().max().unwrap_or(0),
        }
    }
}
