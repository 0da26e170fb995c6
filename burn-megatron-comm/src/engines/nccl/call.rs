//! A call of this rank in the form in which the worker handles it.

use std::sync::Arc;

use super::buffers::{DeviceBuffers, Staging, StagingBuffers};
use super::communicator::{CallQueue, CommKey};
use super::driver::{RecordedEvent, Stream};
use super::library::Addresses;
use super::opening::Opening;
use super::plan::{CommScope, NcclPlan, RECEIVER, SENDER};
use crate::buffer::Buffer;
use crate::call::Signature;
use crate::communicator::Group;
use crate::error::CommError;
use crate::nccl_config::NcclGroup;
use crate::pool::BufferPool;
use crate::process::ResultSlot;

/// A call that the worker launches.
#[derive(Debug)]
pub(super) struct NcclCall {
    pub key: CommKey,
    pub queue: CallQueue,
    /// The kind of group whose settings apply to the communicator.
    pub settings: NcclGroup,
    pub plan: NcclPlan,
    pub group: Arc<Group>,
    pub signature: Arc<Signature>,
    pub memory: CallMemory,
}

/// The device memory of the input and output of a call.
#[derive(Debug)]
pub(super) enum CallMemory {
    Host {
        input: Buffer,
        slot: Arc<ResultSlot>,
        staged: Option<StagingBuffers>,
    },
    Tensor(Arc<DeviceBuffers>),
}

impl NcclCall {
    /// Returns the description of the communicator that the call requires, from the view of this rank.
    pub fn opening(&self) -> Opening {
        let (rank, size) = match self.plan.scope {
            CommScope::Group => (self.group.index(), self.group.size()),
            CommScope::Message { from, .. } if from == self.group.index() => (SENDER, 2),
            CommScope::Message { .. } => (RECEIVER, 2),
        };
        Opening {
            key: self.key,
            rank,
            size,
            group: self.settings,
        }
    }

    /// Returns whether the addresses of the memory are known.
    ///
    /// # Errors
    /// The reason why the memory is not available.
    pub fn memory_known(&self) -> Result<bool, String> {
        match &self.memory {
            CallMemory::Host { .. } => Ok(true),
            CallMemory::Tensor(buffers) => match buffers.addresses() {
                None => Ok(false),
                Some(known) => known.map(|_| true),
            },
        }
    }

    /// Makes `stream` wait for the input and returns the addresses of the memory.
    pub fn prepare(&mut self, stream: Stream, staging: &mut Staging) -> Result<Addresses, String> {
        match &mut self.memory {
            CallMemory::Host { input, staged, .. } => {
                let memory = staging.stage(input, &self.plan)?;
                memory.ready.block(stream)?;
                Ok(staged.insert(memory).addresses)
            }
            CallMemory::Tensor(buffers) => match buffers.addresses() {
                Some(Ok((addresses, ready))) => {
                    ready.map_or(Ok(()), |ready| ready.block(stream))?;
                    Ok(addresses)
                }
                Some(Err(reason)) => Err(reason),
                None => Err("the addresses of a tensor are not known yet".into()),
            },
        }
    }

    /// Records that the call has been put on its stream, before the event `done`.
    pub fn launched(&self, done: &Arc<RecordedEvent>) {
        if let CallMemory::Tensor(buffers) = &self.memory {
            buffers.mark_launched(done);
        }
    }

    /// Completes a call that the device has executed: passes the result on and releases the memory.
    pub fn finish(self, staging: &mut Staging, pool: &BufferPool) -> Result<(), CommError> {
        let to_error = |reason: String| failed(&reason, &self.signature, &self.group);
        match self.memory {
            CallMemory::Tensor(buffers) => {
                buffers.complete(Ok(()));
                Ok(())
            }
            CallMemory::Host {
                input,
                slot,
                staged,
            } => {
                let result = match &staged {
                    Some(staged) => staging.fetch(staged, &self.plan, pool),
                    None => Ok(Buffer::empty(self.plan.dtype)),
                };
                if let Some(staged) = staged {
                    staging.release(&staged, &self.plan);
                }
                pool.give(input);
                let result = result.map_err(to_error);
                let ended = result.as_ref().map(drop).map_err(CommError::clone);
                slot.fulfil(result);
                ended
            }
        }
    }

    /// Fails the call and returns the error. The memory of the call may still be in use.
    pub fn fail(&self, reason: &str) -> CommError {
        let error = failed(reason, &self.signature, &self.group);
        self.refuse(error.clone());
        error
    }

    /// Fails the call with an error that another call has caused.
    pub fn refuse(&self, error: CommError) {
        match &self.memory {
            CallMemory::Host { slot, .. } => slot.fulfil(Err(error)),
            CallMemory::Tensor(buffers) => buffers.complete(Err(error)),
        }
    }

    /// Releases the memory of a call that the device has executed. Passes no result on.
    pub fn discard(self, staging: &mut Staging) {
        match self.memory {
            CallMemory::Tensor(buffers) => buffers.release(),
            CallMemory::Host { staged, .. } => {
                if let Some(staged) = staged {
                    staging.release(&staged, &self.plan);
                }
            }
        }
    }

    /// Leaks the memory of the call, because the device may still write to it.
    pub fn leak(self) {
        if let CallMemory::Tensor(buffers) = &self.memory {
            buffers.leak();
        }
    }
}

fn failed(reason: &str, signature: &Signature, group: &Group) -> CommError {
    let call = signature.describe(group);
    super::error(format!("{reason}, in {call} over {group}"))
}
