//! This rank's part in one call, on its way through the worker.

use std::sync::Arc;

use super::driver::{Driver, Mark, Stream};
use super::lane::Key;
use super::library::Addresses;
use super::memory::{Loan, Staged};
use super::plan::Plan;
use crate::buffer::Buffer;
use crate::call::Signature;
use crate::communicator::Group;
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::Slot;

/// One call.
#[derive(Debug)]
pub(super) struct Item {
    pub key: Key,
    pub plan: Plan,
    pub group: Arc<Group>,
    pub signature: Arc<Signature>,
    pub memory: Memory,
}

/// Where its input comes from and its result goes.
#[derive(Debug)]
pub(super) enum Memory {
    Host {
        input: Buffer,
        slot: Arc<Slot>,
        staged: Option<Staged>,
    },
    Tensor(Arc<Loan>),
}

impl Item {
    /// Whether it is known where the memory lies.
    ///
    /// # Errors
    /// Why there is none.
    pub fn memory_known(&self) -> Result<bool, String> {
        match &self.memory {
            Memory::Host { .. } => Ok(true),
            Memory::Tensor(loan) => match loan.known() {
                None => Ok(false),
                Some(known) => known.map(|_| true),
            },
        }
    }

    /// Makes `stream` wait for the input, and says where the memory lies.
    pub fn settle(
        &mut self,
        stream: Stream,
        copies: Stream,
        driver: &Arc<dyn Driver>,
    ) -> Result<Addresses, String> {
        match &mut self.memory {
            Memory::Host { input, staged, .. } => {
                let memory = Staged::new(input, &self.plan, copies, driver)?;
                memory.ready.hold(stream)?;
                Ok(staged.insert(memory).addresses)
            }
            Memory::Tensor(loan) => match loan.known() {
                Some(Ok((addresses, ready))) => {
                    ready.map_or(Ok(()), |ready| ready.hold(stream))?;
                    Ok(addresses)
                }
                Some(Err(reason)) => Err(reason),
                None => Err("the memory of a tensor is not known yet".into()),
            },
        }
    }

    /// Notes that it is on its stream, up to `done`.
    pub fn launched(&self, done: &Arc<Mark>) {
        if let Memory::Tensor(loan) = &self.memory {
            loan.launch(done);
        }
    }

    /// Ends it after the device has passed: hands the result over and gives the memory back.
    pub fn finish(
        self,
        copies: Stream,
        driver: &Arc<dyn Driver>,
        pool: &BufferPool,
    ) -> Result<(), CommError> {
        let to_error = |reason: String| failed(&reason, &self.signature, &self.group);
        match self.memory {
            Memory::Tensor(loan) => {
                loan.end(Ok(()));
                Ok(())
            }
            Memory::Host {
                input,
                slot,
                staged,
            } => {
                let result = match &staged {
                    Some(staged) => staged.fetch(&self.plan, copies, driver, pool),
                    None => Ok(Buffer::empty(self.plan.dtype)),
                };
                if let Some(staged) = staged {
                    staged.free(copies, driver);
                }
                pool.give(input);
                let result = result.map_err(to_error);
                let ended = result.as_ref().map(drop).map_err(CommError::clone);
                slot.fulfil(result);
                ended
            }
        }
    }

    /// Ends it with an error; its memory may still be in use.
    pub fn fail(&self, reason: &str) -> CommError {
        let error = failed(reason, &self.signature, &self.group);
        self.refuse(error.clone());
        error
    }

    /// Ends it with the error of another one.
    pub fn refuse(&self, error: CommError) {
        match &self.memory {
            Memory::Host { slot, .. } => slot.fulfil(Err(error)),
            Memory::Tensor(loan) => loan.end(Err(error)),
        }
    }

    /// Gives the memory back after the device has passed, with no word to anybody.
    pub fn discard(self, copies: Stream, driver: &Arc<dyn Driver>) {
        match self.memory {
            Memory::Tensor(loan) => loan.give_back(),
            Memory::Host { staged, .. } => {
                if let Some(staged) = staged {
                    staged.free(copies, driver);
                }
            }
        }
    }

    /// Gives the memory up without giving it back, as the device may still write there.
    pub fn leak(self) {
        if let Memory::Tensor(loan) = &self.memory {
            loan.leak();
        }
    }
}

fn failed(reason: &str, signature: &Signature, group: &Group) -> CommError {
    let call = signature.describe(group);
    super::error(format!("{reason}, in {call} over {group}"))
}
