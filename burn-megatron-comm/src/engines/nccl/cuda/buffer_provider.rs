//! Access to the device memory of tensors on a CUDA device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use parking_lot::Mutex;

use super::super::buffer_provider::{DeviceBufferProvider, TakeResult, Wake};
use super::super::buffers::{DeviceBuffers, ResolvedBuffers};
use super::super::driver::{DeviceDriver, RecordedEvent};
use super::super::error;
use super::super::stream_order::{StreamOrder, choose, from_env};
use super::context::ContextEvents;
use super::cube::{Submitter, TensorPair, cuda_index};
use super::driver::CudaDeviceDriver;
use crate::error::CommError;

#[derive(Debug)]
pub(super) struct CudaBufferProvider {
    index: usize,
    driver: Arc<dyn DeviceDriver>,
    submitter: Submitter,
    context_events: Option<ContextEvents>,
    order: StreamOrder,
    /// The reasons why a faster order is not available.
    reasons: Vec<String>,
    /// The first error on the thread that submits work to the device. Every later call fails with this error.
    failure: Arc<Mutex<Option<String>>>,
}

impl CudaBufferProvider {
    /// Creates the provider for tensors on the CUDA device `index`. Uses the given `order`. If it is `None`, uses the
    /// order that the environment variable selects, or else the best available order.
    ///
    /// # Errors
    /// The reason why the selected order is not available.
    pub fn new(
        index: usize,
        driver: &Arc<CudaDeviceDriver>,
        order: Option<StreamOrder>,
    ) -> Result<Self, String> {
        let submitter = Submitter::of(index);
        let context_events = ContextEvents::of(driver.context().cast());
        let there = |order| match order {
            StreamOrder::Stream => try_stream(index, &submitter),
            StreamOrder::Context => context_events.as_ref().map(drop).map_err(String::clone),
            StreamOrder::Host => Ok(()),
        };
        let order = order.map_or_else(from_env, |order| Ok(Some(order)))?;
        let (order, reasons) = choose(order, there)?;
        Ok(Self {
            index,
            driver: driver.clone(),
            submitter,
            context_events: context_events.ok(),
            order,
            reasons,
            failure: Arc::default(),
        })
    }

    fn context_events(&self) -> Result<ContextEvents, CommError> {
        let missing = || error("the order \"context\" was chosen without its events".into());
        self.context_events.ok_or_else(missing)
    }
}

/// Checks that the stream of a small tensor can be determined.
fn try_stream(index: usize, submitter: &Submitter) -> Result<(), String> {
    let look = || {
        let pair = TensorPair::new(Tensor::ones([1], &Device::cuda(index)), 1)?;
        submitter.try_streams(&pair)
    };
    // Burn and CubeCL panic if the device does not work.
    let looked = catch_unwind(AssertUnwindSafe(look));
    looked.unwrap_or_else(|_| Err("CubeCL panicked".into()))
}

impl DeviceBufferProvider for CudaBufferProvider {
    fn takes(&self, device: &Device) -> bool {
        cuda_index(device) == Some(self.index)
    }

    fn stream_order(&self) -> StreamOrder {
        self.order
    }

    fn description(&self) -> String {
        if self.reasons.is_empty() {
            self.order.to_string()
        } else {
            format!("{} ({})", self.order, self.reasons.join("; "))
        }
    }

    fn provide(
        &self,
        input: Tensor<1>,
        output: usize,
        buffers: Arc<DeviceBuffers>,
        wake: Wake,
    ) -> Result<TakeResult, CommError> {
        if !self.takes(&input.device()) {
            return Err(error(format!(
                "a tensor on {:?} was passed to {}",
                input.device(),
                self.driver.name()
            )));
        }
        if let Some(reason) = &*self.failure.lock() {
            return Err(error(format!("an earlier result was lost: {reason}")));
        }
        let pair = TensorPair::new(input, output).map_err(error)?;
        match self.order {
            StreamOrder::Stream => Ok(self.provide_on_stream(pair, buffers, wake)),
            StreamOrder::Context => self.provide_in_context(pair, buffers, wake),
            StreamOrder::Host => provide_after_host(pair, buffers, wake),
        }
    }
}

impl CudaBufferProvider {
    fn provide_on_stream(
        &self,
        pair: TensorPair,
        buffers: Arc<DeviceBuffers>,
        wake: Wake,
    ) -> TakeResult {
        let (driver, filled) = (self.driver.clone(), buffers.clone());
        self.submitter.resolve(pair.handles(), move |found| {
            let resolved = found.and_then(|((addresses, hold), stream)| {
                driver.make_current()?;
                Ok(ResolvedBuffers {
                    addresses,
                    ready: Some(RecordedEvent::record(stream, &driver)?),
                    hold,
                })
            });
            filled.resolve(resolved);
            wake();
        });
        let (submitter, failure) = (self.submitter.clone(), self.failure.clone());
        Box::new(move || {
            let done = done(&buffers)?;
            submitter.streams(&pair, move |streams| {
                let hold = |streams: [_; 2]| streams.into_iter().try_for_each(|s| done.block(s));
                if let Err(reason) = streams.and_then(hold) {
                    tracing::error!("nccl: cannot wait for a result: {reason}");
                    failure.lock().get_or_insert(reason);
                }
            });
            Ok(pair.into_output())
        })
    }

    fn provide_in_context(
        &self,
        pair: TensorPair,
        buffers: Arc<DeviceBuffers>,
        wake: Wake,
    ) -> Result<TakeResult, CommError> {
        let events = self.context_events()?;
        let ready = || {
            self.driver.make_current()?;
            let (addresses, hold) = Submitter::fetch(&pair)?;
            let mark = RecordedEvent::new(&self.driver)?;
            events.record(mark.event())?;
            Ok(ResolvedBuffers {
                addresses,
                ready: Some(Arc::new(mark)),
                hold,
            })
        };
        buffers.resolve(Ok(ready().map_err(error)?));
        wake();
        Ok(Box::new(move || {
            let done = done(&buffers)?;
            events.wait(done.event()).map_err(error)?;
            Ok(pair.into_output())
        }))
    }
}

fn provide_after_host(
    pair: TensorPair,
    buffers: Arc<DeviceBuffers>,
    wake: Wake,
) -> Result<TakeResult, CommError> {
    let ready = || {
        Submitter::sync(&pair)?;
        let (addresses, hold) = Submitter::fetch(&pair)?;
        Ok(ResolvedBuffers {
            addresses,
            ready: None,
            hold,
        })
    };
    buffers.resolve(Ok(ready().map_err(error)?));
    wake();
    // The buffers are marked as launched only after the device has executed the call, so there is nothing to wait for.
    Ok(Box::new(move || Ok(pair.into_output())))
}

fn done(buffers: &DeviceBuffers) -> Result<Arc<RecordedEvent>, CommError> {
    let early = || error("the result of a call was taken before it was launched".into());
    buffers.done().cloned().ok_or_else(early)
}
