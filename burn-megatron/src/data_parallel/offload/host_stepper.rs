//! The threads of a rank that copy gradients to the host and run optimizer steps there.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use burn::tensor::Tensor;
use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::super::bucket_step::{BucketStep, StepFn, SteppedBucket};
use super::super::error::DataParallelError;
use super::super::memory_usage::TrackedTensor;
use super::super::sharding_plan::ShardingPlan;
use super::timeline::Timeline;
use crate::collective::{or_raise, to_host};
use crate::comm::{CommError, raise};
use crate::host_link::caught;

/// The maximum time to wait for one bucket. It is equal to the time for which processes wait for the first call of a
/// group.
const DEADLINE: Duration = Duration::from_secs(300);

/// The input of an optimizer step on the host.
pub(crate) struct HostBucket {
    pub number: usize,
    /// The gradient, on the device.
    pub gradient: TrackedTensor,
    /// The master weights, on the host.
    pub master: TrackedTensor,
    /// The host tensor for the updated parameters in the dtype of the model: see [`BucketStep::model`].
    pub model: Option<Tensor<1>>,
}

/// The result of an optimizer step on the host.
pub(crate) struct HostStepped {
    /// The result of the optimizer step, on the host.
    pub stepped: SteppedBucket,
    /// The updated parameters of the model, on the device.
    pub parameters: Tensor<1>,
}

/// Runs the optimizer steps of buckets on the host, in the order in which they were started. All waits have a deadline.
/// If a thread panics, the wait fails.
#[derive(Debug)]
pub(crate) struct HostStepper {
    /// `None` only while the stepper is dropped.
    jobs: Option<Sender<Job>>,
    /// Empty after a wait that has reached its deadline.
    threads: Mutex<Vec<JoinHandle<()>>>,
    results: Mutex<Receiver<Finished>>,
    timeline: Arc<Timeline>,
    deadline: Duration,
}

struct Job {
    bucket: HostBucket,
    step: Arc<StepFn>,
    /// The outcome of the step: see [`StepFn`].
    outcome: Option<Tensor<1>>,
    /// The time at which the gradient is ready, on the clock of the simulated link.
    ready: Duration,
}

struct Uploaded {
    job: Job,
    gradient: Tensor<1>,
}

struct Finished {
    number: usize,
    /// The time at which the parameters are on the device.
    at: Duration,
    result: Result<HostStepped, String>,
}

impl HostStepper {
    /// Starts the threads of a rank.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::HostThreads`] if the operating system cannot start them.
    pub fn start(plan: &Arc<ShardingPlan>) -> Result<Self, DataParallelError> {
        Self::with_deadline(plan, DEADLINE).map_err(|reason| DataParallelError::HostThreads {
            reason: reason.to_string(),
        })
    }

    pub(super) fn with_deadline(
        plan: &Arc<ShardingPlan>,
        deadline: Duration,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let timeline = Arc::new(Timeline::default());
        let (jobs, to_upload) = channel::<Job>();
        let (uploaded, to_step) = channel::<Uploaded>();
        let (finished, results) = channel();
        // The loops of the host step use the same number of threads as the loops of the rank.
        let pool = ThreadPoolBuilder::new()
            .num_threads(rayon::current_num_threads())
            .thread_name(|_| "offload".into())
            .build()?;
        let uploader = Worker {
            plan: plan.clone(),
            timeline: timeline.clone(),
            finished,
        };
        let stepper = uploader.clone();
        let spawn = |name: &str| thread::Builder::new().name(name.into());
        let threads = vec![
            spawn("offload-up").spawn(move || uploader.upload_all(&to_upload, &uploaded))?,
            spawn("offload-step").spawn(move || stepper.step_all(&to_step, &pool))?,
        ];
        Ok(Self {
            jobs: Some(jobs),
            threads: Mutex::new(threads),
            results: Mutex::new(results),
            timeline,
            deadline,
        })
    }

    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Starts the optimizer step of a bucket. The tensor `outcome` is on the device.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if the threads have ended.
    pub fn begin(&self, bucket: HostBucket, step: &Arc<StepFn>, outcome: Option<&Tensor<1>>) {
        let number = bucket.number;
        let job = Job {
            bucket,
            step: step.clone(),
            outcome: outcome.cloned(),
            ready: self.timeline.now(),
        };
        let sends = |jobs: &Sender<Job>| jobs.send(job).is_ok();
        if !self.jobs.as_ref().is_some_and(sends) {
            raise(error(number, "its thread has ended"));
        }
    }

    /// Waits for the oldest started bucket that has not been waited for. It must be bucket `number`.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if a thread has failed, or if the deadline has passed.
    pub fn wait(&self, number: usize) -> HostStepped {
        let finished = self.results.lock().recv_timeout(self.deadline);
        let finished = finished.map_err(|failed| match failed {
            RecvTimeoutError::Timeout => {
                self.threads.lock().clear();
                let seconds = self.deadline.as_secs_f64();
                error(number, &format!("it has not ended after {seconds} s"))
            }
            RecvTimeoutError::Disconnected => error(number, "its thread has ended"),
        });
        let Finished {
            number: found,
            at,
            result,
        } = or_raise(finished);
        let stepped = or_raise(result.map_err(|message| error(found, &message)));
        debug_assert_eq!(found, number, "buckets are stepped in order");
        self.timeline.waited(at);
        stepped
    }
}

/// Ends the threads. They hold communicators, which must not be freed after the end of their engine.
impl Drop for HostStepper {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.get_mut().drain(..) {
            let _ = thread.join();
        }
    }
}

fn error(bucket: usize, message: &str) -> CommError {
    CommError::Engine {
        engine: "optimizer offload".into(),
        message: format!("the step of bucket {bucket} on the host failed: {message}"),
    }
}

/// The state that both threads share.
#[derive(Clone)]
struct Worker {
    plan: Arc<ShardingPlan>,
    timeline: Arc<Timeline>,
    finished: Sender<Finished>,
}

impl Worker {
    /// Copies gradients to the host, until the rank ends or a copy fails. Each thread has its own stream on the
    /// device, so that copies overlap with steps.
    fn upload_all(&self, jobs: &Receiver<Job>, uploaded: &Sender<Uploaded>) {
        for mut job in jobs {
            let number = job.bucket.number;
            let copied = caught(|| {
                let empty = Tensor::empty([0], &self.plan.device);
                let gradient = std::mem::replace(&mut job.bucket.gradient.tensor, empty);
                let bytes = gradient.dims()[0] * gradient.dtype().size();
                let gradient = to_host(gradient);
                job.outcome = job.outcome.map(to_host);
                job.ready = self.timeline.up(number, bytes as u64, job.ready);
                Uploaded { job, gradient }
            });
            let sent = match copied {
                Ok(copied) => uploaded.send(copied).is_ok(),
                Err(message) => self.fail(number, format!("its gradient: {message}")),
            };
            if !sent {
                return;
            }
        }
    }

    /// Steps buckets, until the rank ends or a step fails.
    fn step_all(&self, uploaded: &Receiver<Uploaded>, pool: &ThreadPool) {
        for uploaded in uploaded {
            let number = uploaded.job.bucket.number;
            let stepped = caught(|| pool.install(|| self.step(uploaded)));
            let sent = match stepped {
                Ok(finished) => self.finished.send(finished).is_ok(),
                Err(message) => self.fail(number, message),
            };
            if !sent {
                return;
            }
        }
    }

    fn step(&self, uploaded: Uploaded) -> Finished {
        let Uploaded { job, gradient } = uploaded;
        let (plan, number) = (&self.plan, job.bucket.number);
        let TrackedTensor { tensor, allocation } = job.bucket.master;
        let bucket = BucketStep {
            number,
            master: tensor,
            gradient: gradient.clone(),
            model: job.bucket.model,
        };
        let stepped = (job.step)(bucket, job.outcome.as_ref());
        plan.recycle(gradient);
        let at = self.timeline.host_step(number, job.ready);
        let values = stepped.model.as_ref().unwrap_or(&stepped.master).clone();
        let bytes = values.dims()[0] * values.dtype().size();
        let parameters = plan.to_device(values);
        drop(allocation);
        Finished {
            number,
            at: self.timeline.down(number, bytes as u64, at),
            result: Ok(HostStepped {
                stepped,
                parameters,
            }),
        }
    }

    /// Reports a failure and returns false.
    fn fail(&self, number: usize, message: String) -> bool {
        let _ = self.finished.send(Finished {
            number,
            at: Duration::ZERO,
            result: Err(message),
        });
        false
    }
}
