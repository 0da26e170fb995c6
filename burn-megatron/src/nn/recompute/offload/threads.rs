//! The threads that copy inputs, one for each direction, each with a stream of its own on the device.

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
    /// Its device.
    pub device: Device,
}

/// The threads; they end when this is dropped.
#[derive(Debug)]
pub(super) struct Threads {
    up: Sender<CopyJob>,
    down: Sender<CopyJob>,
}

impl Threads {
    pub fn start(shared: &Arc<Shared>) -> std::io::Result<Self> {
        let (up, to_host) = channel();
        let (down, to_device) = channel();
        let (of_up, of_down, returned) = (shared.clone(), shared.clone(), down.clone());
        let spawn = |name: &str| thread::Builder::new().name(name.into());
        spawn("offload-up").spawn(move || copy_up(&to_host, &returned, &of_up))?;
        spawn("offload-down").spawn(move || copy_down(&to_device, &of_down))?;
        Ok(Self { up, down })
    }

    /// Copies to the host. Without a thread, which has failed then, nothing happens.
    pub fn up(&self, job: CopyJob) {
        let _ = self.up.send(job);
    }

    /// Copies to the device, likewise.
    pub fn down(&self, job: CopyJob) {
        let _ = self.down.send(job);
    }
}

fn copy_up(jobs: &Receiver<CopyJob>, returned: &Sender<CopyJob>, shared: &Shared) {
    for job in jobs {
        let copied = caught(|| CopyJob {
            x: to_host(job.x),
            ..job
        });
        match copied.map(|job| shared.is_up(job)) {
            Ok(Some(job)) => drop(returned.send(job)),
            Ok(None) => {}
            Err(message) => return shared.fail(message),
        }
    }
}

fn copy_down(jobs: &Receiver<CopyJob>, shared: &Shared) {
    for job in jobs {
        let copied = caught(|| CopyJob {
            x: to_device(job.x, &job.device),
            ..job
        });
        match copied {
            Ok(job) => shared.is_down(job),
            Err(message) => return shared.fail(message),
        }
    }
}
