//! The only module that uses CubeCL's CUDA server, which provides the addresses of buffers and the stream.
//!
//! Work that is submitted here runs on the thread that submits CubeCL's own launches, in order with these launches.
//! Neither the caller nor the GPU waits. CubeCL does not document this behavior. It holds for the version that the
//! workspace pins.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::{BufferBinding, Handle, ServerError};
use cubecl_common::device::Device as _;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_server::runtime::Runtime;
use cubecl_server::server::ServerStorage;
use cubecl_server::stream::{WriteScoped, failed_writing};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUstream;

type Server = <CudaRuntime as Runtime>::Server;

/// The thread that submits the work of a device.
#[derive(Clone, Debug)]
pub(super) struct Submitter {
    device: CudaDevice,
    context: Arc<CudaContext>,
    failure: Arc<Mutex<Option<String>>>,
}

impl Submitter {
    /// Returns the submitter of `device`.
    ///
    /// # Errors
    ///
    /// Returns the error of the driver.
    pub(super) fn of(device: &CudaDevice) -> Result<Self, String> {
        // CubeCL uses the primary context, so this code must use it too.
        let context = CudaContext::new(device.index).map_err(|error| format!("{error:?}"))?;
        Ok(Self {
            device: device.clone(),
            context,
            failure: Arc::default(),
        })
    }

    /// Returns the compute capability of the device.
    ///
    /// # Errors
    ///
    /// Returns the error of the driver.
    pub(super) fn capability(&self) -> Result<(i32, i32), String> {
        let capability = self.context.compute_capability();
        capability.map_err(|error| format!("{error:?}"))
    }

    /// Returns the name of the device.
    ///
    /// # Errors
    ///
    /// Returns the error of the driver.
    pub(super) fn name(&self) -> Result<String, String> {
        self.context.name().map_err(|error| format!("{error:?}"))
    }

    fn handle(&self) -> DeviceHandle<Server> {
        DeviceHandle::new(self.device.to_id())
    }

    /// Runs `work` with the context of the device as the current context. Waits for the result of `work`, but not for
    /// the GPU.
    ///
    /// # Errors
    ///
    /// Returns the error of `work`, or the message of its panic.
    pub(super) fn wait<R: Send>(
        &self,
        work: impl FnOnce() -> Result<R, String> + Send,
    ) -> Result<R, String> {
        let context = self.context.clone();
        let outcome = self.handle().submit_blocking(move |_: &mut Server| {
            bind(&context)?;
            work()
        });
        outcome.map_err(|error| format!("{error:?}"))?
    }

    /// Runs `work` with the addresses of the buffers in order. `work` enqueues operations on the stream of the last
    /// buffer. `written` lists the buffers that the operations write.
    ///
    /// The stream first waits for the work of other streams on the buffers. The memory of the buffers is kept until the
    /// enqueued operations have run. If `work` fails or panics, reading a buffer of `written` fails. Reading results
    /// that CubeCL computes from such a buffer fails too.
    ///
    /// # Panics
    ///
    /// Panics if work that was submitted earlier has failed or panicked, because its output must not be read.
    pub(super) fn submit(
        &self,
        buffers: Vec<Handle>,
        written: Vec<Handle>,
        work: impl FnOnce(&[u64], CUstream) -> Result<(), String> + Send + 'static,
    ) {
        if let Some(failure) = &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            panic!(
                "an earlier matrix product on {:?} failed: {failure}",
                self.device
            );
        }
        let (context, slot) = (self.context.clone(), self.failure.clone());
        let bindings =
            |handles: Vec<Handle>| Vec::from_iter(handles.into_iter().map(Handle::binding));
        let (bindings, written) = (bindings(buffers), bindings(written));
        self.handle().submit(move |server: &mut Server| {
            // If this thread panics, CubeCL only logs the panic.
            let ended = catch_unwind(AssertUnwindSafe(|| run(server, &context, &bindings, work)));
            let Err(reason) = ended.unwrap_or_else(|panic| Err(message(&*panic))) else {
                return;
            };
            tracing::error!("a matrix product on the GPU failed: {reason}");
            slot.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(reason.clone());
            if let Some(stream) = bindings.last().map(|binding| binding.stream) {
                let backtrace = Default::default();
                let error = ServerError::Generic { reason, backtrace };
                failed_writing(server, stream, written, error);
            }
        });
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a panic: {}", text.unwrap_or("without a message"))
}

fn bind(context: &CudaContext) -> Result<(), String> {
    context
        .bind_to_thread()
        .map_err(|error| format!("{error:?}"))
}

fn run(
    server: &mut Server,
    context: &CudaContext,
    bindings: &[BufferBinding],
    work: impl FnOnce(&[u64], CUstream) -> Result<(), String>,
) -> Result<(), String> {
    let Some(stream) = bindings.last().map(|binding| binding.stream) else {
        return Ok(());
    };
    let resources = bindings
        .iter()
        .map(|binding| server.get_resource(binding.clone(), stream));
    let resources: Result<Vec<_>, _> = resources.collect();
    let resources = resources.map_err(|error| format!("{error:?}"))?;
    let addresses: Vec<_> = resources
        .iter()
        .map(|resource| resource.resource().ptr)
        .collect();
    bind(context)?;
    // The buffers are kept until the work is on the stream. When they are dropped, memory of other streams is released
    // after this work.
    let mut streams = server
        .write_streams()
        .resolve(stream, bindings.iter())
        .map_err(|error| format!("{error:?}"))?;
    let current = streams.current();
    for binding in bindings {
        // A graph that is being captured keeps the memory pages of these addresses, because a replay writes to them
        // again.
        let location = binding.memory.descriptor().location();
        current.capturing.touch(binding.stream, location);
    }
    work(&addresses, current.sys)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Work = fn() -> Result<(), String>;

    #[test]
    fn a_product_that_fails_or_panics_fails_its_result_and_the_next_product() {
        let failing: [(Work, &str); 2] = [
            (|| Err("status 7".into()), "status 7"),
            (|| panic!("status 8"), "a panic: status 8"),
        ];
        for (work, reason) in failing {
            let device = CudaDevice { index: 0 };
            let submitter = Submitter::of(&device).unwrap();
            let client = cubecl::Device::Cuda(device).client();
            let (result, other) = (client.empty(16), client.empty(16));
            let submit = || {
                let buffers = vec![other.clone(), result.clone()];
                submitter.submit(buffers, vec![result.clone()], move |_, _| work());
            };
            submit();
            let read = client.read_one(result.clone()).unwrap_err();
            assert!(read.to_string().contains(reason), "{read}");
            client.read_one(other.clone()).unwrap();
            let next = catch_unwind(AssertUnwindSafe(submit)).unwrap_err();
            let next = message(&*next);
            assert!(next.contains(reason), "{next}");
        }
    }
}
