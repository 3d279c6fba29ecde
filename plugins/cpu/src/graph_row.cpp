// Runs compiled graphs one after the other: each takes the last output of the one before it. This file calls the C
// functions that AOTInductor puts into every graph's library (torch/csrc/inductor/aoti_runtime/interface.h). That
// header is not for code that runs with several releases of torch, so it is not included. A call through Python and
// torch's loader takes microseconds more.
#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "tensor.h"

namespace trtspec {
namespace {

using Container = void*;  // a graph with its constants: AOTInductorModelContainerHandle

template <class... Args> using Function = int32_t(Args...);

struct Constant {  // AOTInductorConstantMapEntry
  const char* name;
  AtenTensorHandle tensor;
};

// A graph in a shared library.
class Library {
 public:
  explicit Library(const std::string& path) : library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    OP_REQUIRES(library_ != nullptr, "a compiled graph: ", dlerror());
    Container made;
    ask("ContainerCreateWithDevice", &made, size_t(1), "cpu", static_cast<const char*>(nullptr));
    container_ = {made, find<Container>("ContainerDelete")};
  }
  Library(const Library&) = delete;

  Container container() const { return container_.get(); }

  // Pairs of a constant's names: in the graph, and in the exported program.
  std::vector<std::pair<const char*, const char*>> constants() const {
    size_t count;
    ask("ContainerGetNumConstants", container(), &count);
    std::vector<std::pair<const char*, const char*>> names(count);
    for (size_t i = 0; i < count; ++i) {
      ask("ContainerGetConstantName", container(), i, &names[i].first);
      ask("ContainerGetConstantOriginalFQN", container(), i, &names[i].second);
    }
    return names;
  }

  template <class... Args> Function<Args...>* find(const std::string& name) const {
    void* const found = dlsym(library_.get(), ("AOTInductorModel" + name).c_str());
    OP_REQUIRES(found != nullptr, "a compiled graph: ", dlerror());
    return reinterpret_cast<Function<Args...>*>(found);
  }

  template <class... Args> void ask(const char* name, Args... args) const { expect(find<Args...>(name)(args...)); }

  void expect(int32_t code) const {
    if (code == 0) [[likely]] return;
    const char* why = "";
    if (void* const last = dlsym(library_.get(), "AOTInductorGetLastError"))
      reinterpret_cast<Function<const char**>*>(last)(&why);
    fail("a compiled graph failed: ", why);
  }

 private:
  struct Closes {
    void operator()(void* library) const { dlclose(library); }
  };
  const std::unique_ptr<void, Closes> library_;
  std::unique_ptr<void, Function<Container>*> container_{nullptr, nullptr};
};

// Tensor handles. The destructor deletes those that nothing has taken over: a graph sets the handles that it takes to
// null.
class Handles {
 public:
  explicit Handles(size_t count) : handles_(count) {}
  Handles(const Handles&) = delete;
  ~Handles() {
    for (const AtenTensorHandle handle : handles_)
      if (handle) aoti_torch_delete_tensor_object(handle);
  }
  AtenTensorHandle* data() { return handles_.data(); }

 private:
  std::vector<AtenTensorHandle> handles_;
};

// A graph with its own weights and caches.
class Graph {
 public:
  // constants: in the order of Library::constants. memory: inputs after those of each run.
  Graph(const std::string& path, std::vector<Tensor> constants, std::vector<Tensor> memory)
      : constants_(std::move(constants)), memory_(std::move(memory)), library_(path) {
    const auto names = library_.constants();
    OP_REQUIRES(names.size() == constants_.size(), "open_graph: constants are ", constants_.size(), "; want ",
                names.size());
    std::vector<Constant> held(names.size());  // the graph keeps these handles, also after `held` is gone
    for (size_t i = 0; i < held.size(); ++i) held[i] = {names[i].first, constants_[i].handle()};
    const Container container = library_.container();
    library_.ask("ContainerUpdateUserManagedConstantBufferPairs", container, held.data(), held.size(), false, true);
    library_.ask("ContainerGetNumInputs", container, &inputs_);
    library_.ask("ContainerGetNumOutputs", container, &outputs_);
    OP_REQUIRES(memory_.size() < inputs_, "open_graph: memory is ", memory_.size(), " tensors, and it takes ", inputs_);
  }

  // first: replaces inputs[0]. The graph's outputs are appended to `given`.
  void run(const Tensor& first, const std::vector<Tensor>& inputs, std::vector<Tensor>& given) const {
    const size_t count = inputs.size() + memory_.size();
    OP_REQUIRES(count == inputs_, "run_graphs: inputs are ", inputs.size(), "; want ", inputs_ - memory_.size());
    Handles taken(count), outputs(outputs_);
    AtenTensorHandle* next = taken.data();
    *next++ = first.another();
    for (size_t i = 1; i < inputs.size(); ++i) *next++ = inputs[i].another();
    for (const Tensor& tensor : memory_) *next++ = tensor.another();
    void* const none = nullptr;  // no streams, and no ops that a graph would call through torch's loader
    library_.expect(run_(library_.container(), taken.data(), count, outputs.data(), outputs_, none, none));
    for (size_t i = 0; i < outputs_; ++i) given.push_back(Tensor::owned(std::exchange(outputs.data()[i], nullptr)));
  }

 private:
  const std::vector<Tensor> constants_, memory_;
  const Library library_;
  size_t inputs_, outputs_;
  Function<Container, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t, void*, void*>* const run_ =
      library_.find<Container, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t, void*, void*>("ContainerRun");
};

// Open graphs, by number. The object lives as long as the process.
struct Open {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<const Graph>> graphs;
  int64_t next = 0;
};
Open& opened = *new Open;

std::vector<std::string> graph_constants(const std::string& library) {
  const Library graph(library);
  std::vector<std::string> names;
  for (const auto& [own, name] : graph.constants()) names.emplace_back(name);
  return names;
}

int64_t open_graph(const std::string& library, const std::vector<Tensor>& constants,
                   const std::vector<Tensor>& memory) {
  auto graph = std::make_shared<const Graph>(library, constants, memory);
  const std::lock_guard lock(opened.mutex);
  opened.graphs.emplace(opened.next, std::move(graph));
  return opened.next++;
}

void close_graph(int64_t number) {
  std::shared_ptr<const Graph> last;  // destroyed after the lock is released
  const std::lock_guard lock(opened.mutex);
  if (const auto found = opened.graphs.find(number); found != opened.graphs.end()) {
    last = std::move(found->second);
    opened.graphs.erase(found);
  }
}

// Run graphs one after the other and return all their outputs. The last output of a graph is the next one's first
// input. The other inputs are the same for all graphs.
std::vector<Tensor> run_graphs(const std::vector<int64_t>& numbers, const std::vector<Tensor>& inputs) {
  OP_REQUIRES(!inputs.empty(), "run_graphs: there are no inputs");
  std::vector<std::shared_ptr<const Graph>> graphs;
  {
    const std::lock_guard lock(opened.mutex);
    for (const int64_t number : numbers) {
      const auto found = opened.graphs.find(number);
      OP_REQUIRES(found != opened.graphs.end(), "run_graphs: graph ", number, " is not open");
      graphs.push_back(found->second);
    }
  }
  std::vector<Tensor> given;
  for (const auto& graph : graphs) graph->run(given.empty() ? inputs[0] : given.back(), inputs, given);
  return given;
}

}  // namespace
}  // namespace trtspec

STABLE_TORCH_LIBRARY(trtspec_graphs, m) {
  m.def("graph_constants(str library) -> str[]");
  m.def("open_graph(str library, Tensor[] constants, Tensor[] memory) -> int");
  m.def("close_graph(int number) -> ()");
  m.def("run_graphs(int[] numbers, Tensor[] inputs) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(trtspec_graphs, CompositeExplicitAutograd, m) {
  m.impl("graph_constants", TORCH_BOX(&trtspec::graph_constants));
  m.impl("open_graph", TORCH_BOX(&trtspec::open_graph));
  m.impl("close_graph", TORCH_BOX(&trtspec::close_graph));
  m.impl("run_graphs", TORCH_BOX(&trtspec::run_graphs));
}
