//! The implementation of the device driver interface with the CUDA driver.

use std::sync::Arc;

use cudarc::driver::result::stream::{self, StreamKind};
use cudarc::driver::result::{self, event};
use cudarc::driver::sys::{
    self, CUdevice_attribute, CUevent, CUevent_flags, CUevent_wait_flags, CUpointer_attribute,
    CUresult, CUstream, CUstreamCaptureMode,
};
use cudarc::driver::{CudaContext, DriverError};

use super::super::driver::{Allocation, DeviceDriver, Event, Priority, Stream};

/// A CUDA device with its primary context, which CubeCL also uses.
#[derive(Debug)]
pub(super) struct CudaDeviceDriver {
    context: Arc<CudaContext>,
    index: usize,
}

impl CudaDeviceDriver {
    /// Opens the device `index`.
    ///
    /// # Errors
    /// A message if there is no driver, or if the driver returns an error.
    pub fn new(index: usize) -> Result<Arc<Self>, String> {
        // SAFETY: loads the driver, which has no harmful side effects.
        if !unsafe { sys::is_culib_present() } {
            return Err("the CUDA driver libcuda.so.1 was not found".into());
        }
        let context = CudaContext::new(index).map_err(|error| format!("{error:?}"))?;
        Ok(Arc::new(Self { context, index }))
    }

    /// Returns the context of the device.
    pub fn context(&self) -> sys::CUcontext {
        self.context.cu_ctx()
    }
}

fn check<T>(name: &str, result: Result<T, DriverError>) -> Result<T, String> {
    result.map_err(|error| format!("{name}: {error:?}"))
}

/// Logs an error that cannot be handled. In this case, a handle or some memory is leaked.
fn warn_on_error(name: &str, result: Result<(), DriverError>) {
    if let Err(reason) = check(name, result) {
        tracing::warn!("{reason}");
    }
}

fn stream_of(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

fn event_of(event: Event) -> CUevent {
    event.0 as CUevent
}

// In all methods, streams and events are alive because the callers own them.
impl DeviceDriver for CudaDeviceDriver {
    fn name(&self) -> String {
        format!("cuda:{}", self.index)
    }

    fn make_current(&self) -> Result<(), String> {
        let bound = self.context.bind_to_thread();
        bound.map_err(|error| format!("{error:?}"))
    }

    fn ignore_captures(&self) -> Result<(), String> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the previous mode is written before the call returns.
        let set = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", set.result())
    }

    fn multiprocessors(&self) -> Result<usize, String> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let count = check("cuDeviceGetAttribute", self.context.attribute(attribute))?;
        Ok(count as usize)
    }

    fn create_stream(&self, priority: Priority) -> Result<Stream, String> {
        // The highest priority has the lowest number.
        let (least, greatest) = check("cuCtxGetStreamPriorityRange", stream::get_priority_range())?;
        let priority = match priority {
            Priority::Normal => least,
            Priority::High => greatest,
        };
        let created = stream::create_with_priority(StreamKind::NonBlocking, priority);
        Ok(Stream(
            check("cuStreamCreateWithPriority", created)? as usize
        ))
    }

    fn destroy_stream(&self, stream: Stream) {
        // SAFETY: as above. Pending work on the stream is executed first.
        warn_on_error("cuStreamDestroy", unsafe {
            stream::destroy(stream_of(stream))
        });
    }

    fn create_event(&self) -> Result<Event, String> {
        let created = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Event(check("cuEventCreate", created)? as usize))
    }

    fn destroy_event(&self, event: Event) {
        // SAFETY: as above. Pending waits for the event are still released.
        warn_on_error("cuEventDestroy", unsafe { event::destroy(event_of(event)) });
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), String> {
        // SAFETY: as above.
        let recorded = unsafe { event::record(event_of(event), stream_of(stream)) };
        check("cuEventRecord", recorded)
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<(), String> {
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        let waits = unsafe { stream::wait_event(stream_of(stream), event_of(event), flags) };
        check("cuStreamWaitEvent", waits)
    }

    fn query_event(&self, event: Event) -> Result<bool, String> {
        // SAFETY: as above.
        match unsafe { event::query(event_of(event)) } {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    fn allocate(&self, bytes: usize, stream: Stream) -> Result<u64, String> {
        // SAFETY: as above. A stream-ordered allocation does not wait for the device. `cuMemAlloc` may wait for the
        // device, and thus for collectives too.
        let address = unsafe { result::malloc_async(stream_of(stream), bytes) };
        check("cuMemAllocAsync", address)
    }

    fn allocation(&self, address: u64) -> Result<Allocation, String> {
        let (mut start, mut bytes, mut id) = (0, 0, 0u64);
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        // SAFETY: the results are written before the calls return. The attribute has 8 bytes.
        let (range, attribute) = unsafe {
            (
                sys::cuMemGetAddressRange_v2(&mut start, &mut bytes, address),
                sys::cuPointerGetAttribute((&raw mut id).cast(), attribute, address),
            )
        };
        check("cuMemGetAddressRange", range.result())?;
        check("cuPointerGetAttribute", attribute.result())?;
        Ok(Allocation {
            address: start,
            bytes,
            id,
        })
    }

    fn free(&self, address: u64, stream: Stream) {
        // SAFETY: the address was returned by `allocate` and is freed once.
        let freed = unsafe { result::free_async(address, stream_of(stream)) };
        warn_on_error("cuMemFreeAsync", freed);
    }

    unsafe fn copy_to_device(&self, to: u64, from: &[u8], stream: Stream) -> Result<(), String> {
        let stream = stream_of(stream);
        // SAFETY: guaranteed by the caller.
        let copied = unsafe { result::memcpy_htod_async(to, from, stream) };
        check("cuMemcpyHtoDAsync", copied)?;
        // The call may return before it has read the pageable memory, depending on the size.
        // SAFETY: as above.
        check("cuStreamSynchronize", unsafe {
            stream::synchronize(stream)
        })
    }

    unsafe fn copy_to_host(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<(), String> {
        let stream = stream_of(stream);
        // SAFETY: guaranteed by the caller.
        let copied = unsafe { result::memcpy_dtoh_async(to, from, stream) };
        check("cuMemcpyDtoHAsync", copied)?;
        // SAFETY: as above.
        check("cuStreamSynchronize", unsafe {
            stream::synchronize(stream)
        })
    }

    unsafe fn copy_on_device(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), String> {
        // SAFETY: guaranteed by the caller.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, stream_of(stream)) };
        check("cuMemcpyDtoDAsync", copied)
    }
}
