//! Tracks which saved inputs of recomputed blocks are on the host. It follows the rules of [activation
//! offload](burn_megatron::nn::ActivationOffload).

use std::collections::HashMap;

use crate::profile::StageProfile;
use burn_megatron::nn::ActivationOffload;
use burn_megatron::pipeline::schedule::Action;

/// The sizes of the inputs of one micro-batch in one stage that are on the host, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Offloaded {
    all: u64,
    /// The size of the offloaded inputs that no other operation keeps on the device.
    freed: u64,
}

/// The block inputs of a rank that are on the host.
#[derive(Debug)]
pub(super) struct HostInputs {
    config: ActivationOffload,
    /// Offloaded bytes, keyed by stage and micro-batch.
    of: HashMap<(usize, usize), Offloaded>,
    now: u64,
    /// The peak number of bytes so far.
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

    /// Records the end of a forward. All block inputs except the last `prefetch` inputs are offloaded to the host,
    /// until the byte limit is reached. Returns the number of bytes that are freed on the device.
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

    /// Records the end of a backward, which removes its inputs from the host. Returns the number of bytes that were
    /// freed on the device in the forward.
    pub fn take(&mut self, action: &Action) -> u64 {
        let own = self.of.remove(&(action.stage, action.micro_batch));
        let own = own.unwrap_or_default();
        self.now -= own.all;
        own.freed
    }

    /// Returns the size in bytes of the input that is copied to or from the host during an action. This is the size of
    /// the largest input, or 0 if the action has no inputs on the host. The result is the same in the forward and in
    /// the backward. The backward loads `prefetch` inputs ahead of time. They replace the last `prefetch` inputs, which
    /// are never offloaded and which the backward reads first.
    pub fn on_its_way(&self, action: &Action, stage: &StageProfile) -> u64 {
        let own = self.of.get(&(action.stage, action.micro_batch));
        let inputs = stage.offloadable.iter().map(|input| input.bytes);
        match own {
            Some(own) if own.all > 0 => inputs.max().unwrap_or(0),
            _ => 0,
        }
    }
}
