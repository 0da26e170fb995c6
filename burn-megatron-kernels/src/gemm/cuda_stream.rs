//! The only module that uses CubeCL's CUDA server: the addresses of buffers, and its stream.
//!
//! Work that is submitted here runs on the thread that submits CubeCL's own launches, in order with
//! them, and neither the caller nor the GPU waits. None of this is documented by CubeCL; it holds
//! for the version that the workspace pins.

use std::sync::{Arc, Mutex, PoisonError};

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::{BufferBinding, Handle};
use cubecl_common::device::Device as _;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_server::runtime::Runtime;
use cubecl_server::server::ServerStorage;
use cubecl_server::stream::WriteScoped;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUstream;

type Server = <CudaRuntime as Runtime>::Server;

/// The thread on which a device's work is submitted.
#[derive(Clone, Debug)]
pub(super) struct Submitter {
    device: CudaDevice,
    context: Arc<CudaContext>,
    failure: Arc<Mutex<Option<String>>>,
}

impl Submitter {
    /// The one of `device`.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub(super) fn of(device: &CudaDevice) -> Result<Self, String> {
        // CubeCL works in the primary context, and so does this.
        let context = CudaContext::new(device.index).map_err(|error| format!("{error:?}"))?;
        Ok(Self {
            device: device.clone(),
            context,
            failure: Arc::default(),
        })
    }

    /// The compute capability of the device.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub(super) fn capability(&self) -> Result<(i32, i32), String> {
        let capability = self.context.compute_capability();
        capability.map_err(|error| format!("{error:?}"))
    }

    /// The name of the device.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub(super) fn name(&self) -> Result<String, String> {
        self.context.name().map_err(|error| format!("{error:?}"))
    }

    fn handle(&self) -> DeviceHandle<Server> {
        DeviceHandle::new(self.device.to_id())
    }

    /// Runs `work` with the device's context current and waits for its result, not for the GPU.
    ///
    /// # Errors
    ///
    /// The error of `work`, or its panic.
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

    /// Runs `work`, which enqueues something on the stream of the last buffer, with the addresses
    /// of the buffers in order.
    ///
    /// The stream waits for work of other streams on the buffers, and their memory is kept until
    /// the enqueued work has run.
    ///
    /// # Panics
    ///
    /// If earlier submitted work has failed: its output must not be read.
    pub(super) fn submit(
        &self,
        buffers: Vec<Handle>,
        work: impl FnOnce(&[u64], CUstream) -> Result<(), String> + Send + 'static,
    ) {
        if let Some(failure) = &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            panic!("an earlier product on {:?} failed: {failure}", self.device);
        }
        let (context, slot) = (self.context.clone(), self.failure.clone());
        let bindings: Vec<_> = buffers.into_iter().map(Handle::binding).collect();
        self.handle().submit(move |server: &mut Server| {
            if let Err(error) = run(server, &context, &bindings, work) {
                tracing::error!("a product on the GPU failed: {error}");
                slot.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(error);
            }
        });
    }
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
    // Kept until the work is on the stream: when it is dropped, memory of other streams is released
    // behind that work.
    let mut streams = server
        .write_streams()
        .resolve(stream, bindings.iter())
        .map_err(|error| format!("{error:?}"))?;
    let current = streams.current();
    for binding in bindings {
        // A graph that is captured keeps the pages of these addresses: a replay writes to them again.
        let location = binding.memory.descriptor().location();
        current.capturing.touch(binding.stream, location);
    }
    work(&addresses, current.sys)
}
