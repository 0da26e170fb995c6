//! Lends tensors of the CPU as if they lay on the fake device.

use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor};

use super::super::driver::{Driver, Mark, Stream};
use super::super::lender::{Lender, Redeem, Wake};
use super::super::memory::{Lent, Loan, bytes, bytes_mut};
use super::super::order::Order;
use super::fake_device::{FakeDevice, FakeStream, Later, read, write};
use crate::buffer::Buffer;
use crate::collective::{from_buffer, to_buffer};
use crate::error::CommError;
use crate::process::device_type;

/// How late a tensor's values and its addresses are there.
const LATE: Duration = Duration::from_micros(500);
static LOANS: LazyLock<Later> = LazyLock::new(|| Later::new(LATE));

#[derive(Debug)]
pub struct FakeLender {
    device: Arc<FakeDevice>,
    driver: Arc<dyn Driver>,
    compute: Stream,
    order: Order,
    /// Whether the memory of its tensors turns out to be gone.
    pub breaks: bool,
}

impl FakeLender {
    pub fn new(device: &Arc<FakeDevice>, order: Order) -> Self {
        let driver: Arc<dyn Driver> = device.clone();
        Self {
            compute: driver.stream().unwrap(),
            device: device.clone(),
            driver,
            order,
            breaks: false,
        }
    }
}

impl Drop for FakeLender {
    fn drop(&mut self) {
        self.driver.close(self.compute);
    }
}

/// Memory that is freed on its stream when nobody holds it any more.
struct Held(Arc<FakeDevice>, u64, Stream);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.free(self.1, self.2);
    }
}

impl Lender for FakeLender {
    fn takes(&self, device: &Device) -> bool {
        *device == Device::flex()
    }

    fn order(&self) -> Order {
        self.order
    }

    fn description(&self) -> String {
        self.order.to_string()
    }

    fn lend(
        &self,
        input: Tensor<1>,
        output: usize,
        loan: Arc<Loan>,
        wake: Wake,
    ) -> Result<Redeem, CommError> {
        let (device, dtype) = (input.device(), input.dtype());
        let wire = device_type(dtype).unwrap();
        let input = to_buffer(input);
        let out_bytes = output * wire.size_of();
        let (compute, driver) = (self.compute, self.driver.clone());
        let addresses = [bytes(&input).len(), out_bytes]
            .map(|len| driver.allocate(len.max(1), compute).unwrap());
        let held = addresses.map(|at| Arc::new(Held(self.device.clone(), at, compute)));
        // The result is that of the tensor, whether the call is over or not.
        let kept = held[1].clone();
        // The kernel that computes the input comes late.
        FakeStream::of(compute.0).put(move || {
            thread::sleep(LATE);
            // SAFETY: the memory is held by the loan.
            unsafe { write(addresses[0], bytes(&input)) };
        });
        let late = self.order == Order::Host;
        let mark = match late {
            true => {
                FakeStream::of(compute.0).run(|| {});
                None
            }
            false => Some(Mark::behind(compute, &driver).unwrap()),
        };
        let (filled, breaks) = (loan.clone(), self.breaks);
        // And so do the addresses.
        LOANS.put(move || {
            filled.fill(match breaks {
                true => Err("the memory is gone".into()),
                false => Ok(Lent {
                    addresses,
                    ready: mark,
                    hold: Box::new(held),
                }),
            });
            wake();
        });
        let driver = self.driver.clone();
        Ok(Box::new(move || {
            let done = loan.done().expect("launched").clone();
            match late {
                true => assert!(done.passed().unwrap(), "the host did not wait"),
                false => driver.wait(compute, done.event()).unwrap(),
            }
            let mut result = Buffer::zeros(wire, output);
            let target = bytes_mut(&mut result).as_mut_ptr() as u64;
            // A kernel that reads the result.
            FakeStream::of(compute.0).run(move || unsafe {
                write(target, read(addresses[1], out_bytes));
            });
            drop(kept);
            Ok(from_buffer(result, [output], &device, dtype))
        }))
    }
}
