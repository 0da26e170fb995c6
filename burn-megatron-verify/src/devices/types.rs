//! Maps the dtypes of recorded tensors to the dtypes of a device.

use burn::tensor::{DType, Device};
use burn_ir::{IrVisitorMut, OperationIr, TensorIr};

/// The mapping from the dtypes of a recording to the dtypes of a device.
#[derive(Clone, Copy)]
pub(super) struct Types {
    exact: bool,
    int: DType,
    bool: DType,
}

impl Types {
    pub fn of(device: &Device, exact: bool) -> Self {
        let settings = device.settings();
        Self {
            exact,
            int: settings.int_dtype.into(),
            bool: settings.bool_dtype.into(),
        }
    }

    pub fn map(&self, dtype: DType) -> DType {
        match dtype {
            DType::Bool(_) => self.bool,
            // The integer type of the recording device.
            DType::I64 => self.int,
            dtype if dtype.is_float() && self.exact => DType::F64,
            dtype => dtype,
        }
    }

    pub fn tensor(&self, tensor: &TensorIr) -> TensorIr {
        TensorIr {
            dtype: self.map(tensor.dtype),
            ..tensor.clone()
        }
    }

    pub fn operation(mut self, mut operation: OperationIr) -> OperationIr {
        match &mut operation {
            OperationIr::NumericFloat(dtype, _) | OperationIr::Float(dtype, _) => {
                *dtype = self.map(*dtype);
            }
            OperationIr::NumericInt(dtype, _) => *dtype = self.map(*dtype),
            _ => {}
        }
        operation.visit_mut(&mut self);
        operation
    }
}

impl IrVisitorMut for Types {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        tensor.dtype = self.map(tensor.dtype);
    }
}
