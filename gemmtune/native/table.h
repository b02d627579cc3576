// Kept calls: an open addressing table of records. Everything here happens while the GIL is held.
#pragma once
#include "launch.h"
#include "result.h"

#include <memory>
#include <variant>

namespace gemmtune {

// How a call is done; nothing is known of one that only Python can do. The order is that of KINDS in records.py.
using Launch = std::variant<std::monostate, HostFunction, TorchOperation, DriverLaunch, DeviceFunction, LibraryProduct>;

// What a call with this key does. Those that run it count as users: it outlives its place in the table.
struct Record {
  Key key;
  uint64_t hash = 0;
  int users = 1;
  bool lengthy = false;         // worth letting other threads of Python run meanwhile
  uint64_t capture_info = 0;    // of a layer: asked whether a graph is captured, where Python has the say; 0: need not be asked
  PyObject* entry = nullptr;    // of the table of Python
  PyObject* fresh = nullptr;    // new(tensors, scalars)
  PyObject* into = nullptr;     // into(out, tensors, scalars)
  PyObject* choice = nullptr;   // that has a format of its own for a prepacked b, else null
  PyObject* owner = nullptr;    // of the memory and the code that a launch points to
  std::vector<int64_t> spans;   // bytes of out and of each tensor that is read
  Result result;
  Memory memory;
  Launch launch;

  Record() = default;
  Record(Record const&) = delete;
  ~Record() {
    Py_XDECREF(entry);
    Py_XDECREF(fresh);
    Py_XDECREF(into);
    Py_XDECREF(choice);
    Py_XDECREF(owner);
  }
};

inline void leave(Record* record) {
  if (--record->users == 0) delete record;
}

class Table {
 public:
  Record* find(Key const& key) const {
    const uint64_t hash = key.hash();
    for (size_t i = hash & mask_;; i = (i + 1) & mask_) {
      Record* record = slots_[i];
      if (record == nullptr || (record->hash == hash && record->key == key)) return record;
    }
  }

  // Takes the record over, in the place of one with the same key.
  void insert(std::unique_ptr<Record> record) {
    record->hash = record->key.hash();
    if ((count_ + 1) * 2 > slots_.size()) grow();
    Record*& slot = place(slots_, mask_, *record);
    Record* before = slot;
    slot = record.release();
    if (before == nullptr) ++count_;
    else leave(before);
  }

  void clear() {
    std::vector<Record*> before(kLeastSlots, nullptr);
    before.swap(slots_);
    mask_ = kLeastSlots - 1;
    count_ = 0;
    for (Record* record : before) {  // may run Python, which finds the table empty
      if (record != nullptr) leave(record);
    }
  }

  size_t count() const { return count_; }

 private:
  static constexpr size_t kLeastSlots = 1024;

  static Record*& place(std::vector<Record*>& slots, size_t mask, Record const& record) {
    for (size_t i = record.hash & mask;; i = (i + 1) & mask) {
      if (slots[i] == nullptr || (slots[i]->hash == record.hash && slots[i]->key == record.key)) return slots[i];
    }
  }

  void grow() {
    std::vector<Record*> more(slots_.size() * 2, nullptr);
    for (Record* record : slots_) {
      if (record != nullptr) place(more, more.size() - 1, *record) = record;
    }
    slots_.swap(more);
    mask_ = slots_.size() - 1;
  }

  std::vector<Record*> slots_ = std::vector<Record*>(kLeastSlots, nullptr);
  size_t mask_ = kLeastSlots - 1;
  size_t count_ = 0;
};

}  // namespace gemmtune
