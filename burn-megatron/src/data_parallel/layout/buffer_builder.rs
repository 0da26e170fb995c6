//! The assignment of parameters to buckets.

use std::ops::Range;

use super::{
    Bucket, BucketParameter, BucketRules, BufferKey, FlatBuffer, LayoutError, ParameterSize,
};

/// The index of a parameter in the parameter table, and the size of the parameter.
pub(super) type IndexedSize<'a> = (usize, &'a ParameterSize);

/// Builds the buffer of `members`, which are in reverse order of the parameter table.
pub(super) fn build_buffer(
    key: BufferKey,
    members: &[IndexedSize],
    rules: &BucketRules,
) -> Result<FlatBuffer, LayoutError> {
    let mut builder = BufferBuilder {
        key,
        rules,
        multiple: rules.bucket_multiple(&key)?,
        open: None,
        closed: vec![],
    };
    // The gradient of a shared parameter becomes final last, because the first stage uses it at the end of
    // backward.
    let (shared, others): (Vec<&IndexedSize>, Vec<_>) =
        members.iter().partition(|member| member.1.shared);
    for member in others.into_iter().chain(shared) {
        builder.add(member)?;
    }
    builder.close();
    let elements = builder.elements();
    let bytes = members.iter().filter_map(|(_, size)| size.quantized_bytes);
    Ok(FlatBuffer {
        key,
        elements,
        quantized_bytes: bytes.fold(0, usize::saturating_add),
        buckets: builder.closed,
    })
}

/// A buffer whose last bucket may still be open.
struct BufferBuilder<'a> {
    key: BufferKey,
    rules: &'a BucketRules,
    /// Bucket sizes are padded to this multiple.
    multiple: usize,
    /// The open bucket; its range is still empty.
    open: Option<Bucket>,
    closed: Vec<Bucket>,
}

impl BufferBuilder<'_> {
    /// Returns the number of elements of the closed buckets.
    fn elements(&self) -> usize {
        self.closed.last().map_or(0, |bucket| bucket.range.end)
    }

    fn add(&mut self, member: &IndexedSize) -> Result<(), LayoutError> {
        let (index, size) = *member;
        let fits = |open: &Bucket| open.unit == size.unit && !size.shared;
        if !self.open.as_ref().is_some_and(fits) {
            self.close();
        }
        let used = self.open.as_ref().map_or(0, Bucket::used);
        let range = self
            .next_range(used, size.elements)
            .ok_or(LayoutError::BufferTooLarge {
                index,
                elements: size.elements,
                key: self.key,
                limit: self.limit(),
            })?;
        let full = self.rules.size.is_some_and(|size| range.end >= size);
        let begin = self.elements();
        let open = self.open.get_or_insert_with(|| Bucket {
            unit: size.unit,
            shared: size.shared,
            shards: self.rules.shards(self.key.grid),
            range: begin..begin,
            parameters: vec![],
        });
        open.parameters.push(BucketParameter { index, range });
        if full {
            self.close();
        }
        Ok(())
    }

    /// Returns the range of the next parameter in the open bucket, or `None` if the padded buffer would be too
    /// large to allocate.
    fn next_range(&self, used: usize, elements: usize) -> Option<Range<usize>> {
        let start = used.checked_next_multiple_of(self.rules.align)?;
        let end = start.checked_add(elements)?;
        let padded = end.checked_next_multiple_of(self.multiple)?;
        let all = self.elements().checked_add(padded)?;
        (all <= self.limit()).then_some(start..end)
    }

    /// Pads and closes the open bucket, or does nothing without an open bucket. The size was checked when the bucket
    /// was filled.
    fn close(&mut self) {
        if let Some(mut open) = self.open.take() {
            open.range.end += open.used().next_multiple_of(self.multiple);
            self.closed.push(open);
        }
    }

    /// Returns the maximum number of elements. No allocation can exceed `isize::MAX` bytes.
    fn limit(&self) -> usize {
        let bytes = self
            .key
            .parameter
            .size_of()
            .max(self.key.gradient.size_of());
        isize::MAX as usize / bytes
    }
}
