//! Lends the tensors of a CUDA device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{Device, Tensor};

use super::super::driver::{Driver, Mark};
use super::super::error;
use super::super::lender::{Lender, Redeem, Wake};
use super::super::memory::{Lent, Loan};
use super::super::order::{Order, asked, choose};
use super::context::ContextEvents;
use super::cube::{Pair, Submitter, cuda_index};
use super::driver::CudaDriver;
use crate::error::CommError;

#[derive(Debug)]
pub(super) struct CudaLender {
    index: usize,
    driver: Arc<dyn Driver>,
    submitter: Submitter,
    context_events: Option<ContextEvents>,
    order: Order,
    /// Why the order is no better one.
    reasons: Vec<String>,
    /// What went wrong on the thread that submits; every later call fails with it.
    failure: Arc<Mutex<Option<String>>>,
}

impl CudaLender {
    /// Lends the tensors of the device `index`, in the order that is given, or the one that the environment
    /// asks for, or the best that is there.
    ///
    /// # Errors
    /// Why the one that is asked for cannot be had.
    pub fn new(
        index: usize,
        driver: &Arc<CudaDriver>,
        order: Option<Order>,
    ) -> Result<Self, String> {
        let submitter = Submitter::of(index);
        let context_events = ContextEvents::of(driver.context().cast());
        let there = |order| match order {
            Order::Stream => try_stream(index, &submitter),
            Order::Context => context_events.as_ref().map(drop).map_err(String::clone),
            Order::Host => Ok(()),
        };
        let order = order.map_or_else(asked, |order| Ok(Some(order)))?;
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

/// Whether the stream of a small tensor is found.
fn try_stream(index: usize, submitter: &Submitter) -> Result<(), String> {
    let look = || {
        let pair = Pair::new(Tensor::ones([1], &Device::cuda(index)), 1)?;
        submitter.try_streams(&pair)
    };
    // Burn and CubeCL panic where the device does not work.
    let looked = catch_unwind(AssertUnwindSafe(look));
    looked.unwrap_or_else(|_| Err("CubeCL panicked".into()))
}

impl Lender for CudaLender {
    fn takes(&self, device: &Device) -> bool {
        cuda_index(device) == Some(self.index)
    }

    fn order(&self) -> Order {
        self.order
    }

    fn description(&self) -> String {
        match self.reasons.is_empty() {
            true => self.order.to_string(),
            false => format!("{} ({})", self.order, self.reasons.join("; ")),
        }
    }

    fn lend(
        &self,
        input: Tensor<1>,
        output: usize,
        loan: Arc<Loan>,
        wake: Wake,
    ) -> Result<Redeem, CommError> {
        if !self.takes(&input.device()) {
            return Err(error(format!(
                "a tensor on {:?} was given to {}",
                input.device(),
                self.driver.name()
            )));
        }
        if let Some(reason) = &*lock(&self.failure) {
            return Err(error(format!("an earlier result was lost: {reason}")));
        }
        let pair = Pair::new(input, output).map_err(error)?;
        match self.order {
            Order::Stream => Ok(self.lend_on_stream(pair, loan, wake)),
            Order::Context => self.lend_in_context(pair, loan, wake),
            Order::Host => lend_after_host(pair, loan, wake),
        }
    }
}

impl CudaLender {
    fn lend_on_stream(&self, pair: Pair, loan: Arc<Loan>, wake: Wake) -> Redeem {
        let (driver, filled) = (self.driver.clone(), loan.clone());
        self.submitter.lend(pair.handles(), move |found| {
            let lent = found.and_then(|((addresses, hold), stream)| {
                driver.enter()?;
                Ok(Lent {
                    addresses,
                    ready: Some(Mark::behind(stream, &driver)?),
                    hold,
                })
            });
            filled.fill(lent);
            wake();
        });
        let (submitter, failure) = (self.submitter.clone(), self.failure.clone());
        Box::new(move || {
            let done = done(&loan)?;
            submitter.follow(&pair, move |streams| {
                let hold = |streams: [_; 2]| streams.into_iter().try_for_each(|s| done.hold(s));
                if let Err(reason) = streams.and_then(hold) {
                    tracing::error!("nccl: a result is not waited for: {reason}");
                    lock(&failure).get_or_insert(reason);
                }
            });
            Ok(pair.into_output())
        })
    }

    fn lend_in_context(
        &self,
        pair: Pair,
        loan: Arc<Loan>,
        wake: Wake,
    ) -> Result<Redeem, CommError> {
        let events = self.context_events()?;
        let ready = || {
            self.driver.enter()?;
            let (addresses, hold) = Submitter::fetch(&pair)?;
            let mark = Mark::new(&self.driver)?;
            events.record(mark.event())?;
            Ok(Lent {
                addresses,
                ready: Some(Arc::new(mark)),
                hold,
            })
        };
        loan.fill(Ok(ready().map_err(error)?));
        wake();
        Ok(Box::new(move || {
            let done = done(&loan)?;
            events.wait(done.event()).map_err(error)?;
            Ok(pair.into_output())
        }))
    }
}

fn lend_after_host(pair: Pair, loan: Arc<Loan>, wake: Wake) -> Result<Redeem, CommError> {
    let ready = || {
        Submitter::sync(&pair)?;
        let (addresses, hold) = Submitter::fetch(&pair)?;
        Ok(Lent {
            addresses,
            ready: None,
            hold,
        })
    };
    loan.fill(Ok(ready().map_err(error)?));
    wake();
    // The loan is launched only when the device has passed, so nothing is left to wait for.
    Ok(Box::new(move || Ok(pair.into_output())))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn done(loan: &Loan) -> Result<Arc<Mark>, CommError> {
    let early = || error("the result of a call was asked for before it was launched".into());
    loan.done().cloned().ok_or_else(early)
}
