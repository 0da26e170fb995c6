//! A provider of the memory of CPU tensors, which it presents as memory of the fake device.

use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor};

use super::super::buffer_provider::{DeviceBufferProvider, TakeResult, Wake};
use super::super::buffers::{DeviceBuffers, ResolvedBuffers, bytes, bytes_mut};
use super::super::driver::{DeviceDriver, Priority, RecordedEvent, Stream};
use super::super::stream_order::StreamOrder;
use super::collectives::{from_buffer, to_buffer};
use super::fake_device::{DelayedTasks, FakeDevice, FakeStream, read, write};
use crate::buffer::Buffer;
use crate::error::CommError;
use crate::process::device_type;

/// The delay until the values and the addresses of a tensor are available.
const DELAY: Duration = Duration::from_micros(500);
static LOANS: LazyLock<DelayedTasks> = LazyLock::new(|| DelayedTasks::new(DELAY));

#[derive(Debug)]
pub struct FakeBufferProvider {
    device: Arc<FakeDevice>,
    driver: Arc<dyn DeviceDriver>,
    compute: Stream,
    order: StreamOrder,
    /// Whether the provider fails to resolve the memory of tensors.
    pub breaks: bool,
}

impl FakeBufferProvider {
    pub fn new(device: &Arc<FakeDevice>, order: StreamOrder) -> Self {
        let driver: Arc<dyn DeviceDriver> = device.clone();
        Self {
            compute: driver.create_stream(Priority::Normal).unwrap(),
            device: device.clone(),
            driver,
            order,
            breaks: false,
        }
    }
}

impl Drop for FakeBufferProvider {
    fn drop(&mut self) {
        self.driver.destroy_stream(self.compute);
    }
}

/// Memory that is freed on its stream when it is dropped.
struct Held(Arc<FakeDevice>, u64, Stream);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.free(self.1, self.2);
    }
}

impl DeviceBufferProvider for FakeBufferProvider {
    fn takes(&self, device: &Device) -> bool {
        *device == Device::flex()
    }

    fn stream_order(&self) -> StreamOrder {
        self.order
    }

    fn description(&self) -> String {
        self.order.to_string()
    }

    fn provide(
        &self,
        input: Tensor<1>,
        output: usize,
        buffers: Arc<DeviceBuffers>,
        wake: Wake,
    ) -> Result<TakeResult, CommError> {
        let (device, dtype) = (input.device(), input.dtype());
        let wire = device_type(dtype).unwrap();
        let input = to_buffer(input);
        let out_bytes = output * wire.size_of();
        let (compute, driver) = (self.compute, self.driver.clone());
        let addresses = [bytes(&input).len(), out_bytes]
            .map(|len| driver.allocate(len.max(1), compute).unwrap());
        let held = addresses.map(|at| Arc::new(Held(self.device.clone(), at, compute)));
        // The tensor owns the memory of the result, even if the call is not complete.
        let kept = held[1].clone();
        // The kernel that computes the input is late.
        FakeStream::of(compute.0).put(move || {
            thread::sleep(DELAY);
            // SAFETY: the buffers keep the memory alive.
            unsafe { write(addresses[0], bytes(&input)) };
        });
        let late = self.order == StreamOrder::Host;
        let mark = if late {
            FakeStream::of(compute.0).run(|| {});
            None
        } else {
            Some(RecordedEvent::record(compute, &driver).unwrap())
        };
        let (filled, breaks) = (buffers.clone(), self.breaks);
        // The addresses are late too.
        LOANS.put(move || {
            filled.resolve(if breaks {
                Err("the memory is gone".into())
            } else {
                Ok(ResolvedBuffers {
                    addresses,
                    ready: mark,
                    hold: Box::new(held),
                })
            });
            wake();
        });
        let driver = self.driver.clone();
        Ok(Box::new(move || {
            let done = buffers.done().expect("launched").clone();
            if late {
                assert!(done.is_complete().unwrap(), "the host did not wait")
            } else {
                driver.stream_wait_event(compute, done.event()).unwrap()
            }
            let mut result = Buffer::zeros(wire, output);
            let target = bytes_mut(&mut result).as_mut_ptr() as u64;
            // A kernel that reads the result.
            FakeStream::of(compute.0).run(move || unsafe {
                write(target, read(addresses[1], out_bytes));
            });
            drop(kept);
            Ok(from_buffer(result, &device, dtype))
        }))
    }
}
