//! The copy threads, one for each direction. Each has its own stream on the device.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use burn::tensor::{Device, Tensor};

use super::store::Shared;
use crate::collective::{to_device, to_host};
use crate::host_link::caught;

/// An input to copy.
pub(super) struct CopyJob {
    pub number: u64,
    pub x: Tensor<1>,
    pub bytes: u64,
    /// The device of the input.
    pub device: Device,
}

/// The copy threads. They end when this value is dropped. A thread that has failed takes no more jobs, and has reported
/// its failure.
#[derive(Debug)]
pub(super) struct Threads {
    /// The queue of copies to the host.
    pub up: Sender<CopyJob>,
    /// The queue of copies to the device.
    pub down: Sender<CopyJob>,
}

impl Threads {
    pub fn start(shared: &Arc<Shared>) -> std::io::Result<Self> {
        let (up, jobs_up) = channel();
        let (down, jobs_down) = channel();
        let (of_up, of_down, returned) = (shared.clone(), shared.clone(), down.clone());
        let spawn = |name: &str| thread::Builder::new().name(name.into());
        spawn("offload-up").spawn(move || {
            copy_all(
                &jobs_up,
                &of_up,
                |x, _| to_host(x),
                |job| {
                    if let Some(job) = of_up.is_up(job) {
                        drop(returned.send(job));
                    }
                },
            );
        })?;
        spawn("offload-down").spawn(move || {
            copy_all(&jobs_down, &of_down, to_device, |job| of_down.is_down(job));
        })?;
        Ok(Self { up, down })
    }
}

/// Copies the input of each job, and passes the job with the copy to `done`. Stops at the first failure.
fn copy_all(
    jobs: &Receiver<CopyJob>,
    shared: &Shared,
    copy: impl Fn(Tensor<1>, &Device) -> Tensor<1>,
    done: impl Fn(CopyJob),
) {
    for job in jobs {
        let copied = caught(|| CopyJob {
            x: copy(job.x, &job.device),
            ..job
        });
        match copied {
            Ok(job) => done(job),
            Err(message) => return shared.fail(message),
        }
    }
}
