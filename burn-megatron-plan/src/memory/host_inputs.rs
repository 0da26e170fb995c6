//! Which saved inputs of recomputed blocks are on the host, by the rules of their
//! [store](burn_megatron::nn::ActivationOffload).

use std::collections::HashMap;

use crate::profile::StageProfile;
use burn_megatron::nn::ActivationOffload;
use burn_megatron::pipeline::schedule::Action;

/// Bytes of the inputs of a stage and a micro-batch that are on the host.
#[derive(Clone, Copy, Debug, Default)]
struct Offloaded {
    all: u64,
    /// The inputs that nothing else keeps on the device.
    freed: u64,
}

/// The inputs of a rank that are on the host.
#[derive(Debug)]
pub(super) struct HostInputs {
    config: ActivationOffload,
    /// By stage and micro-batch.
    of: HashMap<(usize, usize), Offloaded>,
    now: u64,
    /// The most so far.
    pub peak: u64,
}

impl HostInputs {
    pub fn new(config: ActivationOffload) -> Self {
        Self {
            config,
            of: HashMap::new(),
            now: 0,
            peak: 0,
        }
    }

    /// The forward of an action is over: all of its inputs but the last ones leave, as far as the budget has room. Returns
    /// the bytes that the device has no more.
    pub fn leave(&mut self, action: &Action, stage: &StageProfile) -> u64 {
        let last = stage.offloadable.len().saturating_sub(self.config.prefetch);
        let mut own = Offloaded::default();
        for input in &stage.offloadable[..last] {
            if self.now + own.all + input.bytes <= self.config.bytes {
                own.all += input.bytes;
                own.freed += if input.is_shared { 0 } else { input.bytes };
            }
        }
        self.now += own.all;
        self.peak = self.peak.max(self.now);
        self.of.insert((action.stage, action.micro_batch), own);
        own.freed
    }

    /// The backward of an action is over. Returns the bytes that were not on the device.
    pub fn take(&mut self, action: &Action) -> u64 {
        let own = self.of.remove(&(action.stage, action.micro_batch));
        let own = own.unwrap_or_default();
        self.now -= own.all;
        own.freed
    }

    /// Returns the bytes of inputs in transfer that an action with inputs on the host has on the device: the input that
    /// is on its way, in the forward as in the backward, where the `prefetch` inputs that are ahead have taken the
    /// place of the last ones.
    pub fn on_its_way(&self, action: &Action, stage: &StageProfile) -> u64 {
        let own = self.of.get(&(action.stage, action.micro_batch));
        let inputs = stage.offloadable.iter().map(|input| input.bytes);
        match own {
            Some(own) if own.all > 0 => inputs.max().unwrap_or(0),
            _ => 0,
        }
    }
}
