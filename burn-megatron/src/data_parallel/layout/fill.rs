//! How buckets are filled.

use std::ops::Range;

use super::{Bucket, BucketRules, BufferKey, FlatBuffer, LayoutError, ParameterSize, Placed};

/// A parameter and its place in the table.
pub(super) type Member<'a> = (usize, &'a ParameterSize);

/// The buffer of `members`, which come in reverse order of the table.
pub(super) fn fill(
    key: BufferKey,
    members: &[Member],
    rules: &BucketRules,
) -> Result<FlatBuffer, LayoutError> {
    let mut filling = Filling {
        key,
        rules,
        multiple: rules.bucket_multiple(&key)?,
        open: None,
        closed: vec![],
    };
    // A shared parameter's gradient is final last: the first stage uses it after all others.
    let (shared, own): (Vec<&Member>, Vec<_>) = members.iter().partition(|member| member.1.shared);
    for member in own.into_iter().chain(shared) {
        filling.add(member)?;
    }
    filling.close();
    let elements = filling.elements();
    let bytes = members.iter().filter_map(|(_, size)| size.quantized_bytes);
    Ok(FlatBuffer {
        key,
        elements,
        quantized_bytes: bytes.fold(0, usize::saturating_add),
        buckets: filling.closed,
    })
}

/// A buffer whose last bucket may still be open.
struct Filling<'a> {
    key: BufferKey,
    rules: &'a BucketRules,
    /// What bucket ends are padded to.
    multiple: usize,
    /// The open bucket; its range is still empty.
    open: Option<Bucket>,
    closed: Vec<Bucket>,
}

impl Filling<'_> {
    /// Elements of the closed buckets.
    fn elements(&self) -> usize {
        self.closed.last().map_or(0, |bucket| bucket.range.end)
    }

    fn add(&mut self, member: &Member) -> Result<(), LayoutError> {
        let (index, size) = *member;
        let fits = |open: &Bucket| open.part == size.part && !size.shared;
        if !self.open.as_ref().is_some_and(fits) {
            self.close();
        }
        let used = self.open.as_ref().map_or(0, Bucket::used);
        let range = self.place(used, size.elements);
        let range = range.ok_or(LayoutError::TooLarge {
            index,
            elements: size.elements,
            key: self.key,
            limit: self.limit(),
        })?;
        let full = self.rules.size.is_some_and(|size| range.end >= size);
        let begin = self.elements();
        let open = self.open.get_or_insert_with(|| Bucket {
            part: size.part,
            shared: size.shared,
            shards: self.rules.shards(self.key.expert),
            range: begin..begin,
            parameters: vec![],
        });
        open.parameters.push(Placed { index, range });
        if full {
            self.close();
        }
        Ok(())
    }

    /// Where a parameter comes to lie in the open bucket; `None` if the buffer, padded, then is
    /// larger than memory can be.
    fn place(&self, used: usize, elements: usize) -> Option<Range<usize>> {
        let start = used.checked_next_multiple_of(self.rules.align)?;
        let end = start.checked_add(elements)?;
        let padded = end.checked_next_multiple_of(self.multiple)?;
        let all = self.elements().checked_add(padded)?;
        (all <= self.limit()).then_some(start..end)
    }

    /// Pads the open bucket, if there is one. That it fits was seen when it was filled.
    fn close(&mut self) {
        if let Some(mut open) = self.open.take() {
            open.range.end += open.used().next_multiple_of(self.multiple);
            self.closed.push(open);
        }
    }

    /// No allocation has more than `isize::MAX` bytes.
    fn limit(&self) -> usize {
        let bytes = self
            .key
            .parameter
            .size_of()
            .max(self.key.gradient.size_of());
        isize::MAX as usize / bytes
    }
}
