//! Point-to-point transfers of activations and gradients between pipeline ranks.
//!
//! Each tensor is preceded by a header with its action, shape and type, so that shapes may differ
//! between micro-batches. A tensor that arrives before it is requested is queued.

use std::collections::HashMap;

use burn::tensor::{DType, Device, Tensor};

use super::super::schedule::{Action, ActionKind};
use crate::collective::{Comm, from_buffer, to_buffer};
use crate::comm::{self, Buffer, CommError, Pending};

/// Length of a header: kind, stage, micro-batch, three sizes, type.
const HEADER: usize = 7;

pub(super) struct P2pChannel<'a> {
    comm: &'a Comm,
    device: Device,
    /// Tensors that arrived before they were requested, by the sending action.
    early: HashMap<Action, Tensor<3>>,
    sent: Vec<Pending>,
}

impl<'a> P2pChannel<'a> {
    pub fn new(comm: &'a Comm, device: &Device) -> Self {
        Self {
            comm,
            device: device.clone(),
            early: HashMap::new(),
            sent: vec![],
        }
    }

    /// Starts sending the tensor of `action` to the rank `to`.
    pub fn send(&mut self, to: usize, action: &Action, x: Tensor<3>) -> Result<(), CommError> {
        let [batch, seq, hidden] = x.dims();
        let buffer = to_buffer(x);
        let header = [
            code(action.kind),
            action.stage as i64,
            action.micro_batch as i64,
            batch as i64,
            seq as i64,
            hidden as i64,
            dtype_code(buffer.dtype()),
        ];
        self.sent
            .push(self.comm.start_send(Buffer::from(header.to_vec()), to)?);
        self.sent.push(self.comm.start_send(buffer, to)?);
        Ok(())
    }

    /// Waits for the tensor that rank `from` sends in `action`.
    pub fn receive(&mut self, from: usize, action: &Action) -> Result<Tensor<3>, CommError> {
        loop {
            if let Some(x) = self.early.remove(action) {
                return Ok(x);
            }
            let (action, x) = self.next(from)?;
            self.early.insert(action, x);
        }
    }

    /// Waits until all sends have completed.
    pub fn finish(&mut self) -> Result<(), CommError> {
        self.sent
            .drain(..)
            .try_for_each(|pending| pending.wait().map(drop))
    }

    fn next(&self, from: usize) -> Result<(Action, Tensor<3>), CommError> {
        let header = self.comm.receive(from, comm::DType::I64, HEADER)?;
        let header: Vec<i64> = header.into_vec();
        let &[kind, stage, micro_batch, batch, seq, hidden, dtype] = &header[..] else {
            unreachable!("a header has {HEADER} numbers")
        };
        let kind = if kind == 0 {
            ActionKind::SendActivation
        } else {
            ActionKind::SendGradient
        };
        let action = Action::new(kind, stage as usize, micro_batch as usize);
        let shape = [batch, seq, hidden].map(|size| size as usize);
        let (wire, dtype) = dtypes(dtype);
        let buffer = self.comm.receive(from, wire, shape.iter().product())?;
        Ok((action, from_buffer(buffer, shape, &self.device, dtype)))
    }
}

fn code(kind: ActionKind) -> i64 {
    i64::from(kind == ActionKind::SendGradient)
}

fn dtype_code(dtype: comm::DType) -> i64 {
    match dtype {
        comm::DType::F64 => 0,
        comm::DType::F32 => 1,
        comm::DType::BF16 => 2,
        _ => 3,
    }
}

fn dtypes(code: i64) -> (comm::DType, DType) {
    match code {
        0 => (comm::DType::F64, DType::F64),
        1 => (comm::DType::F32, DType::F32),
        2 => (comm::DType::BF16, DType::BF16),
        _ => (comm::DType::F16, DType::F16),
    }
}
