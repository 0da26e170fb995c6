//! Checks the result of the first kernel on a device against the host.

use std::sync::Once;

use burn::tensor::{Device, Tensor, TensorData};

use super::{DeviceError, failure, watch};
use crate::kernels::unchecked::{UNCHECKED, is_unchecked};

/// The number of elements of the checked tensor: one warp.
const COUNT: usize = 32;

/// Compiles and runs a kernel on `device`, and compares its result with the host. Call this function before anything
/// else runs on the device. After this call, [`failure`] reports the panics of device threads.
///
/// # Errors
///
/// [`DeviceError::WrongResults`] if the result differs, and [`DeviceError::Failed`] if the kernel could not
/// run.
pub fn check_results(device: &Device) -> Result<(), DeviceError> {
    watch();
    if is_unchecked() {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| tracing::warn!("{UNCHECKED} is set: results may be wrong"));
        return Ok(());
    }
    let device = device.clone().inner();
    let numbers: Vec<f32> = (0..COUNT).map(|number| number as f32).collect();
    let x = Tensor::<1>::from_data(TensorData::new(numbers.clone(), [COUNT]), &device);
    let read = (x.clone() * x + 0.5).try_into_data();
    // A panic makes the result wrong, so the panic is reported first.
    failure()?;
    let wrong = |difference| DeviceError::WrongResults {
        device: format!("{device:?}"),
        difference,
    };
    let found: Vec<f32> = match read {
        Ok(data) => data.iter().collect(),
        Err(error) => return Err(wrong(error.to_string())),
    };
    let expected = numbers.iter().map(|number| number * number + 0.5);
    let different = found.iter().zip(expected).zip(&numbers);
    match different
        .into_iter()
        .find(|((found, expected), _)| **found != *expected)
    {
        Some(((found, expected), x)) => {
            Err(wrong(format!("{x} * {x} + 0.5 is {expected}, not {found}")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_computes_right_results() {
        assert_eq!(check_results(&Device::flex()), Ok(()));
    }
}
