//! What gives the memory of tensors to NCCL.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::memory::Loan;
use super::order::Order;
use crate::error::CommError;

/// Tells the worker that a loan is filled.
pub(super) type Wake = Box<dyn FnOnce() + Send>;

/// Gives the result of a call, once the loan is launched.
pub(super) type Redeem = Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>;

/// Lends tensors of one device.
pub(super) trait Lender: fmt::Debug + Send + Sync {
    /// Whether it lends those of `device`.
    fn takes(&self, device: &Device) -> bool;

    /// How it puts calls in order with what the device computes.
    fn order(&self) -> Order;

    /// The order in words, with the reasons why it is no better one.
    fn description(&self) -> String;

    /// Lends `input` and memory for a result of `output` elements of its type: fills the loan, now or
    /// soon, and then calls `wake`.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the tensor does not lie there.
    fn lend(
        &self,
        input: Tensor<1>,
        output: usize,
        loan: Arc<Loan>,
        wake: Wake,
    ) -> Result<Redeem, CommError>;
}
